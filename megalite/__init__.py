"""megalite: pre-train GPT-like models, or models of one's own, under any parallel layout (docs/library.md).

All names are imported when they are first used: `import megalite` imports neither torch nor any other library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalite.config.model import ModelConfig as GPTConfig
    from megalite.errors import MegaliteError
    from megalite.library.settings import SGD, AdamW, Layout, Muon
    from megalite.library.trainer import Trainer
    from megalite.modules.batch_norm import SyncBatchNorm
    from megalite.parallel.context import ParallelContext
    from megalite.parallel.embedding import VocabParallelEmbedding
    from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear
    from megalite.parallel.stage import LossTerm, StageOutput, TensorSpec

__all__ = [
    "SGD",
    "AdamW",
    "ColumnParallelLinear",
    "GPTConfig",
    "Layout",
    "LossTerm",
    "MegaliteError",
    "Muon",
    "ParallelContext",
    "RowParallelLinear",
    "StageOutput",
    "SyncBatchNorm",
    "TensorSpec",
    "Trainer",
    "VocabParallelEmbedding",
]

_MODULES = {
    "SGD": "library.settings",
    "AdamW": "library.settings",
    "ColumnParallelLinear": "parallel.linear",
    "GPTConfig": "config.model",
    "Layout": "library.settings",
    "LossTerm": "parallel.stage",
    "MegaliteError": "errors",
    "Muon": "library.settings",
    "ParallelContext": "parallel.context",
    "RowParallelLinear": "parallel.linear",
    "StageOutput": "parallel.stage",
    "SyncBatchNorm": "modules.batch_norm",
    "TensorSpec": "parallel.stage",
    "Trainer": "library.trainer",
    "VocabParallelEmbedding": "parallel.embedding",
}
_OTHER_NAMES = {"GPTConfig": "ModelConfig"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"megalite has no public name {name}: docs/library.md lists all of them")
    value = getattr(import_module(f"megalite.{_MODULES[name]}"), _OTHER_NAMES.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]

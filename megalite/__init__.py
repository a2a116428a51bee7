"""megalite: pre-train GPT-like models, or models of one's own, under any parallel layout (docs/library.md).

All names are imported when they are first used: `import megalite` imports neither torch nor any other library.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

_KERNELS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "kernels")
if os.path.isfile(os.path.join(_KERNELS, "megalite_kernels", "__init__.py")) and _KERNELS not in sys.path:
    sys.path.insert(0, _KERNELS)  # in a clone: its own kernels, also if nothing or another clone is installed

if TYPE_CHECKING:
    from megalite.config.model import ModelConfig as GPTConfig
    from megalite.errors import MegaliteError
    from megalite.extras.post_training.receivers import SGLangReceiver, VLLMReceiver
    from megalite.extras.post_training.weight_link import LinkReceiver, receive_weights
    from megalite.library.adapters import add_lora
    from megalite.library.experts import Experts
    from megalite.library.layer_kinds import register_layer
    from megalite.library.layers import (
        ColumnParallelLinear,
        ParallelAttention,
        RowParallelLinear,
        VocabParallelEmbedding,
        gather_sequence,
        split_sequence,
        token_positions,
        vocab_parallel_cross_entropy,
    )
    from megalite.library.settings import LAMB, LARS, SGD, Adafactor, AdamW, Layout, Lion, Muon
    from megalite.library.trainer import Trainer
    from megalite.model.norm import LayerNorm, RMSNorm
    from megalite.modules.batch_norm import SyncBatchNorm
    from megalite.parallel.context import ParallelContext
    from megalite.parallel.stage import LossTerm, StageOutput, TensorSpec
    from megalite.version import __version__ as __version__

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adafactor",
    "AdamW",
    "ColumnParallelLinear",
    "Experts",
    "GPTConfig",
    "LayerNorm",
    "Layout",
    "LinkReceiver",
    "Lion",
    "LossTerm",
    "MegaliteError",
    "Muon",
    "ParallelAttention",
    "ParallelContext",
    "RMSNorm",
    "RowParallelLinear",
    "SGLangReceiver",
    "StageOutput",
    "SyncBatchNorm",
    "TensorSpec",
    "Trainer",
    "VLLMReceiver",
    "VocabParallelEmbedding",
    "add_lora",
    "gather_sequence",
    "receive_weights",
    "register_layer",
    "split_sequence",
    "token_positions",
    "vocab_parallel_cross_entropy",
]

_MODULES = {
    "LAMB": "library.settings",
    "LARS": "library.settings",
    "SGD": "library.settings",
    "Adafactor": "library.settings",
    "AdamW": "library.settings",
    "ColumnParallelLinear": "library.layers",
    "Experts": "library.experts",
    "GPTConfig": "config.model",
    "LayerNorm": "model.norm",
    "Layout": "library.settings",
    "LinkReceiver": "extras.post_training.weight_link",
    "Lion": "library.settings",
    "LossTerm": "parallel.stage",
    "MegaliteError": "errors",
    "Muon": "library.settings",
    "ParallelAttention": "library.layers",
    "ParallelContext": "parallel.context",
    "RMSNorm": "model.norm",
    "RowParallelLinear": "library.layers",
    "StageOutput": "parallel.stage",
    "SGLangReceiver": "extras.post_training.receivers",
    "SyncBatchNorm": "modules.batch_norm",
    "TensorSpec": "parallel.stage",
    "Trainer": "library.trainer",
    "VLLMReceiver": "extras.post_training.receivers",
    "VocabParallelEmbedding": "library.layers",
    "add_lora": "library.adapters",
    "gather_sequence": "library.layers",
    "split_sequence": "library.layers",
    "token_positions": "library.layers",
    "vocab_parallel_cross_entropy": "library.layers",
    "__version__": "version",
    "receive_weights": "extras.post_training.weight_link",
    "register_layer": "library.layer_kinds",
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

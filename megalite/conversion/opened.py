"""Model that is open for reading, independent of its format, and sources that wrap other sources."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.manifest import MODEL, STATE
from megalite.checkpoint.tensors import Kind, Source, widest
from megalite.config import ModelConfig
from megalite.config.kinds.sparse_attention import without_indexers
from megalite.config.layer_costs import least_parameters
from megalite.config.prediction import without_depths
from megalite.conversion.adapters import Adapters
from megalite.errors import CheckpointError
from megalite.model.gpt import GPT
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.sharding import Box, LogicalTensor
from megalite.parallel.state import states_of

_SHOWN = 8
_NAMES = 300
"""Minimum total length in bytes of the names of a layer's tensors."""
_SMALL = 1 << 20
"""Size in bytes up to which a model is always built on the meta device, and its tensors are checked one by one."""


@dataclass(frozen=True)
class OpenedModel:
    """Network, with a source of its weights."""

    what: str
    """Description in messages: the format and the folder."""
    config: ModelConfig
    source: Source
    """Source of the logical tensors, by name."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Known fields about the tokenizer, from section `data` of the configuration."""
    sequence_length: int | None = None
    """Sequence length that the model was trained on, if known."""
    folder: Path | None = None
    """Hugging Face folder with the tokenizer and related files, if there is one."""
    ends: tuple[int, ...] = ()
    """Tokens before which its texts end, as far as its files name them."""
    is_huggingface: bool = False
    """True if the weights are in that folder, too."""
    notes: tuple[str, ...] = ()
    """Notes for the user, such as on weights that were left out."""
    path: str | None = None
    """Folder from which it was opened, as checkpoints of adapters name it."""
    adapters: Adapters | None = None
    """Adapters that are merged into the weights of `source`, with the base; None if there are none."""

    def without_depths(self) -> OpenedModel:
        """Return the network that predicts the next token alone, with a note if weights are left out."""
        if not (names := tensors_of_depths(self.config)):
            return self
        kept = {name: name for name in self.source.tensors if name not in names}
        note = (
            f"note: {len(self.source.tensors) - len(kept)} tensors of depths that predict further tokens are left out"
        )
        config, source = without_depths(self.config), Renamed(self.source, kept)
        return replace(self, config=config, source=source, notes=(*self.notes, note))

    @property
    def dtype(self) -> torch.dtype:
        """Widest dtype of the weights that are not always fp32."""
        return dtype_of_weights(self.source.tensors, self.config)


def dtype_of_weights(kinds: Mapping[str, Kind], model: ModelConfig) -> torch.dtype:
    """Return the widest dtype of a network's weights, by name, without those that are kept in fp32."""
    precise = kept_in_fp32(model)
    return widest(kind for name, kind in kinds.items() if not name.startswith(STATE) and name not in precise)


def tensors_of_training(model: ModelConfig) -> dict[str, LogicalTensor]:
    """Return the logical tensors of a network by name, in its order. Modules' state follows as `state/NAME`."""
    network = GPT(model, ParallelMesh(device=torch.device("meta")))
    weights = {piece.tensor.name: piece.tensor for _, piece in named_pieces(network)}
    states = (piece.tensor for state in states_of(network) for piece in state.sharding.pieces)
    return weights | {STATE + tensor.name: tensor for tensor in states}


def logical_tensors(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the logical tensors on which a network's function depends, as `tensors_of_training` does."""
    kinds = model.moe_router_load_balancing_type if model.balances_by_quantiles else ("none",)
    without_losses = replace(model, moe_router_load_balancing_type=kinds, moe_aux_loss_coeff=(0.0,))
    return {name: tensor.shape for name, tensor in tensors_of_training(without_losses).items()}


def kept_in_fp32(model: ModelConfig) -> frozenset[str]:
    """Return the names of the logical tensors that are fp32 in a network whose dtype is narrower."""
    return frozenset(name for name, tensor in tensors_of_training(model).items() if tensor.fp32)


def tensors_of_depths(model: ModelConfig) -> set[str]:
    """Return the names of the tensors of multi-token prediction alone, as in `tensors_of_training`."""
    if not model.depths:
        return set()
    return tensors_of_training(model).keys() - tensors_of_training(without_depths(model)).keys()


def tensors_of_indexers(model: ModelConfig) -> set[str]:
    """Return the names of the weights of indexers."""
    if "sparse_attention" not in model.kinds:
        return set()
    return tensors_of_training(model).keys() - tensors_of_training(without_indexers(model)).keys()


def in_checkpoint(names: Iterable[str]) -> Iterator[str]:
    """Yield the names in megalite's checkpoints of tensors as `tensors_of_training` names them."""
    return (name if name.startswith(STATE) else MODEL + name for name in names)


def states_of_training(model: ModelConfig) -> set[str]:
    """Return the names of modules' state that only training needs: the loads that a balancing loss remembers."""
    if model.num_experts is None:
        return set()
    return {name for name in tensors_of_training(model) if name.startswith(STATE)} - logical_tensors(model).keys()


def check_sizes(folder: Path, model: ModelConfig) -> None:
    """Raise CheckpointError if a folder's files are too small for the network that it describes.

    This check comes before anything of the network's size is built. A parameter takes at least one byte in the files,
    and so does each character in the names of a layer's tensors.
    """
    paths = (path for pattern in ("*", "*/*") for path in folder.glob(pattern))
    there = sum(path.stat().st_size for path in paths if path.is_file())
    parameters = least_parameters(model)
    if parameters + _NAMES * model.num_layers > max(there, _SMALL):
        raise CheckpointError(
            f"{folder} has files of {there:,} bytes, too few for the model that it describes, of {model.num_layers} "
            f"layers and at least {parameters:,} parameters (are some missing, or pointers of Git LFS?)"
        )


def cast_to(dtype: torch.dtype | None, precise: bool) -> torch.dtype | None:
    """Return the dtype to which a weight is cast; None for no cast. `precise`: to none narrower than fp32."""
    return torch.promote_types(dtype, torch.float32) if precise and dtype is not None else dtype


class Renamed:
    """Tensors of a source under other names, with the weights optionally cast to another dtype (a `Source`)."""

    def __init__(
        self,
        source: Source,
        names: Mapping[str, str],
        dtype: torch.dtype | None = None,
        precise: Container[str] = (),
    ) -> None:
        """Create the source.

        `names` has the name of each tensor in `source`, by its new name. `precise`: names in `source` of weights that
        are cast to no dtype narrower than fp32.
        """
        self._source, self._names = source, names
        self.tensors = {}
        for name, old in names.items():
            kind = source.tensors[old]
            to = torch.float32 if name.startswith(STATE) else cast_to(dtype, old in precise) or kind.dtype
            self.tensors[name] = Kind(kind.shape, to)

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        self._source.fill(self._names[name], box, values)


class Watched:
    """Wrapper of a source that records which tensors contain NaN or infinities (a `Source`).

    A model with such weights computes nothing useful, and nothing else detects this.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._found: set[str] = set()
        self.tensors: Mapping[str, Kind] = source.tensors

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        self._source.fill(name, box, values)
        if values.numel() and not all(math.isfinite(end.item()) for end in values.aminmax()):
            self._found.add(name)

    def notes(self) -> tuple[str, ...]:
        """Return a warning about the tensors that were read so far; none if all values are finite."""
        if not self._found:
            return ()
        names = sorted(self._found)
        more = ", ..." if len(names) > _SHOWN else ""
        return (
            f"WARNING: {len(names):,} of {len(self.tensors):,} tensors have NaN or infinities: "
            f"{', '.join(names[:_SHOWN])}{more}",
        )

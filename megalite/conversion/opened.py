"""A model that is open to be read, whatever it was saved as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.source import Kind, Source
from megalite.config import ModelConfig
from megalite.config.validate_sizes import least_parameters
from megalite.errors import CheckpointError
from megalite.model.gpt import GPT
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.sharding import Box

_NAMES = 300
"""Bytes of the names of a layer's tensors, at least."""
_SMALL = 1 << 20
"""Bytes of a model that is quickly made without memory; its tensors are looked for one by one."""


@dataclass(frozen=True)
class OpenedModel:
    """A network and where its weights are."""

    what: str
    """What it is, for people: the format and the folder."""
    config: ModelConfig
    source: Source
    """Its logical tensors, by name."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What of the configuration's section `data` is known of its tokenizer."""
    sequence_length: int | None = None
    """The length that it was trained on, if that is known."""
    folder: Path | None = None
    """A Hugging Face folder with its tokenizer and with what else goes with it, if there is one."""
    is_huggingface: bool = False
    """Whether the weights are in that folder, too."""


def logical_tensors(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a network's logical tensors by name, in the order in which it has them."""
    network = GPT(model, ParallelMesh(device=torch.device("meta")))
    return {piece.tensor.name: piece.tensor.shape for _, piece in named_pieces(network)}


def check_sizes(folder: Path, model: ModelConfig) -> None:
    """Raise CheckpointError for a network that the files in a folder cannot hold, before anything of its size is made.

    A parameter takes a byte at least, and so does each letter of the names of a layer's tensors.
    """
    paths = (path for pattern in ("*", "*/*") for path in folder.glob(pattern))
    there = sum(path.stat().st_size for path in paths if path.is_file())
    parameters = least_parameters(model)
    if parameters + _NAMES * model.num_layers > max(there, _SMALL):
        raise CheckpointError(
            f"{folder} has files of {there:,} bytes, too few for the model that it describes, of {model.num_layers} "
            f"layers and at least {parameters:,} parameters (are some missing, or pointers of Git LFS?)"
        )


class Renamed:
    """Some tensors of a source by other names, cast to another dtype or as they are (a `Source`)."""

    def __init__(self, source: Source, names: Mapping[str, str], dtype: torch.dtype | None = None) -> None:
        """`names`: what each is called in `source`, by its new name."""
        self._source, self._names = source, names
        kinds = {name: source.tensors[old] for name, old in names.items()}
        self.tensors = {name: Kind(kind.shape, dtype or kind.dtype) for name, kind in kinds.items()}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """As in `Source`."""
        self._source.fill(self._names[name], box, values)

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
from megalite.model.gpt import GPT
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.sharding import Box


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

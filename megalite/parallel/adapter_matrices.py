"""Matrices that can have low-rank adapters, and the placement of their factors.

Matrices are those that the records of the weights name (`LogicalTensor.matrices`), and tables with a row per token. A
fused weight has adapters for each part by itself, as PEFT has. The places of factors follow from that of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.config.adapters import AdaptersConfig
from megalite.errors import ConfigurationError
from megalite.parallel.mesh import Group
from megalite.parallel.parameter import Parameter
from megalite.parallel.sharding import Box, Constant, Drawn, LogicalTensor, Normal, Piece, Sharding

A, B, MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
"""Last words of the names of adapters' tensors, behind the name of a matrix."""
TABLES = {"embedding.word": "embedding.word_embeddings", "output": "output_layer"}
"""Names of the matrices of a GPT's tables, which are those of Megatron-LM."""


@dataclass(frozen=True)
class Even:
    """Initial values drawn evenly between -bound and bound."""

    shape: tuple[int, ...]
    bound: float

    def __call__(self, generator: torch.Generator) -> Tensor:
        return (torch.rand(self.shape, generator=generator) * 2 - 1) * self.bound


@dataclass(frozen=True)
class Factor:
    """A tensor of an adapter, whose dimensions are some of those of the adapted tensor, and the rank.

    Attributes:
        dimensions: for each dimension, that of the adapted tensor; None for the rank.
        columns: number of last dimensions that are the columns of the local matrix; 0 for a vector.
    """

    tensor: LogicalTensor
    dimensions: tuple[int | None, ...]
    rank: int
    columns: int

    def place(self, piece: Piece, like: Sharding, over: Group | None) -> Sharding:
        """Return the placement beside a piece of a weight.

        Args:
            like: the placement of the weight, as which the factor is replicated.
            over: the ranks of the layer, if each of them has the whole factor and a part of its gradient.
        """
        size = self.sizes(piece.box.size)
        box = Box(tuple(0 if d is None else piece.box.offset[d] for d in self.dimensions), size)
        splits = tuple((self.dimensions.index(d), axis) for d, axis in piece.splits if d in self.dimensions)
        rows = math.prod(size[: len(size) - self.columns])
        # The padding of a table has rows of B, too, so that no rank has an empty one.
        padded = rows + (
            like.local_shape[0] - piece.rows if piece.tensor.is_embedding_or_output and over is None else 0
        )
        shape = (padded, math.prod(size[len(size) - self.columns :])) if self.columns else (padded,)
        placed = replace(like, local_shape=shape, pieces=(Piece(self.tensor, box, 0, rows, splits),))
        return placed if over is None else replace(placed, replica_ranks=over.ranks, grad_is_partial=over.size > 1)

    def beside(self, weight: Parameter, over: Group | None) -> Parameter:
        """Return the parameter beside a weight of one piece. `over`: see `place`."""
        (piece,) = weight.sharding.pieces
        return Parameter(self.place(piece, weight.sharding, over), weight.dtype, weight.device)

    def sizes(self, of_tensor: Sequence[int]) -> tuple[int, ...]:
        """Return the lengths of the dimensions, given those of the adapted tensor or of a box of it."""
        return tuple(self.rank if d is None else of_tensor[d] for d in self.dimensions)


@dataclass(frozen=True)
class Matrix:
    """A matrix of a logical tensor, or one of each expert, that can have an adapter.

    Attributes:
        name: that of the tensor, or of a part of it: `attention.key` and `attention.value` of `attention.key_value`.
        part: the dimension of the tensor that enumerates its parts, and the number of this one; None if it has none.
        looked_up: True if its rows are looked up. As in PEFT, A is drawn wider then, and DoRA's lengths are those of
            columns.
    """

    name: str
    tensor: LogicalTensor
    part: tuple[int, int] | None = None
    looked_up: bool = False

    @property
    def is_table(self) -> bool:
        """True if its rows stand for tokens. Those are adapted only if they are named."""
        return self.tensor.is_embedding_or_output

    @property
    def experts(self) -> tuple[int, ...]:
        """Dimensions of the tensor that enumerate experts."""
        return tuple(d for d in self.tensor.matrix_dimensions if self.part is None or d != self.part[0])

    @property
    def columns(self) -> tuple[int, ...]:
        """Dimensions of the tensor that are columns: its last ones."""
        return self.tensor.column_dimensions

    @property
    def rows(self) -> tuple[int, ...]:
        """Dimensions of the tensor that are experts and rows."""
        own = range(len(self.tensor.shape) - len(self.columns))
        return tuple(d for d in own if self.part is None or d != self.part[0])

    def a(self, rank: int) -> Factor:
        """Return A, [experts, rank, columns], with PEFT's initial values."""
        experts, columns = (" ".join(f"d{d}" for d in each) for each in (self.experts, self.columns))
        pattern = f"{experts} rank {columns} -> {experts or 1} rank ({columns})"
        factor = self._factor(A, (*self.experts, None, *self.columns), pattern, rank, len(self.columns))
        even = Drawn(Even(factor.tensor.shape, 1 / math.sqrt(self.tensor.matrix_size[1])))
        drawn = Normal(1.0) if self.looked_up else even
        return replace(factor, tensor=replace(factor.tensor, initial=drawn))

    def b(self, rank: int) -> Factor:
        """Return B, [experts and rows as in the tensor, rank], which begins with zeros."""
        experts, rows, every = (
            " ".join(f"d{d}" for d in each)
            for each in (self.experts, [d for d in self.rows if d not in self.experts], self.rows)
        )
        return self._factor(B, (*self.rows, None), f"{every} rank -> {experts or 1} ({rows}) rank", rank, 1)

    def factors(self, config: AdaptersConfig) -> list[Factor]:
        """Return all tensors of an adapter."""
        rank = config.lora_rank or 0
        return [self.a(rank), self.b(rank), *([self.magnitude()] if config.use_dora else [])]

    def magnitude(self) -> Factor:
        """Return the difference of lengths to the first ones, [experts and rows as in the tensor], or [columns]."""
        return self._factor(MAGNITUDE, self.columns if self.looked_up else self.rows, None, 0, 0)

    @property
    def summed(self) -> tuple[int, ...]:
        """Dimensions of the tensor over which DoRA's lengths are."""
        return self.rows if self.looked_up else self.columns

    def _factor(
        self, word: str, dimensions: tuple[int | None, ...], matrices: str | None, rank: int, columns: int
    ) -> Factor:
        tensor = LogicalTensor(f"{self.name}.{word}", (), Constant(0.0), matrices is not None, matrices)
        factor = Factor(tensor, dimensions, rank, columns)
        return replace(factor, tensor=replace(tensor, shape=factor.sizes(self.tensor.shape)))

    def check(self, rank: int) -> None:
        """Raise ConfigurationError for a rank that no update of this matrix has."""
        if rank > min(self.tensor.matrix_size):
            rows, columns = self.tensor.matrix_size
            raise ConfigurationError(
                f"--lora-rank {rank} is more than {self.name} [{rows}, {columns}] can have: give a lower one, or leave "
                "the matrix out of --lora-target-modules"
            )


def matrices_of(tensor: LogicalTensor) -> list[Matrix]:
    """Return the matrices of a tensor that can have adapters: those that its record names, or a table of tokens."""
    if tensor.is_embedding_or_output and tensor.matrices is None:
        table = replace(tensor, matrices="tokens hidden -> 1 tokens hidden")
        name = TABLES.get(tensor.name, tensor.name.removesuffix(".weight"))
        return [Matrix(name, table, looked_up=tensor.name == "embedding.word")]
    if tensor.matrices is None:
        return []
    name = tensor.name.removesuffix(".weight")
    begin, dot, last = name.rpartition(".")
    words, dimensions = last.split("_"), tensor.matrix_dimensions
    if dimensions and len(words) == 2 and tensor.shape[dimensions[-1]] == 2:
        return [Matrix(f"{begin}{dot}{word}", tensor, (dimensions[-1], at)) for at, word in enumerate(words)]
    return [Matrix(name, tensor)]


def row_factors(first: Tensor, magnitudes: Tensor, now: Tensor) -> Tensor:
    """Return the factors by which rows of the lengths `now` get those of DoRA, `first` + `magnitudes`.

    A row of zeros has no direction: it stays as it is, with gradients of plain LoRA.
    """
    return torch.where(now > 0, (first + magnitudes) / torch.where(now > 0, now, 1.0), 1.0)

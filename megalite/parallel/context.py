"""The mesh, the split of activations and the dtype of weights, which all layers of a network share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megalite.parallel import placement
from megalite.parallel.mesh import DENSE_AXES, Group, ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.products import ALONE, PLAIN, Products
from megalite.parallel.rounded_products import RoundedProducts, Rounding
from megalite.parallel.sharding import Box, LogicalTensor, Piece, Sharding

Meaning = Literal["heads", "ffn", "vocabulary", "experts", "expert ffn"]
AXES: Mapping[Meaning, tuple[str, ...]] = {
    "heads": ("tp",),
    "ffn": ("tp",),
    "vocabulary": ("tp",),
    "experts": ("ep",),
    "expert ffn": ("etp",),
}
"""The mesh axes that split each kind of dimension of a logical tensor."""


@dataclass(frozen=True)
class AttentionWay:
    """Way in which context-parallel ranks compute attention together.

    Attributes:
        head_ranks: number of neighbouring ranks that exchange heads for tokens. The others pass keys and values.
        gathers: True to gather keys and values instead of passing them around a ring.
        chains: True if recurrent layers pass states from run to run of a sample instead of composing gathered maps.
    """

    head_ranks: int = 1
    gathers: bool = False
    chains: bool = False


@dataclass(frozen=True)
class ParallelContext:
    """Parallel settings that all layers of a network share.

    Layers select groups by the meanings of dimensions ("heads", "ffn", "experts"), never by the names of axes.

    Attributes:
        sequence_parallel: True if activations between the matrix products are split along the sequence, over the
            tensor-parallel ranks.
        dtype: dtype of weights and activations.
        attention_ways: how each layer of the network computes attention under context parallelism; one for all layers,
            or one per layer.
        rounding: how linear layers round the operands of their products; None: they do not.
    """

    mesh: ParallelMesh
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    attention_ways: tuple[AttentionWay, ...] = (AttentionWay(),)
    rounding: Rounding | None = None

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.mesh.size("tp") == 1:
            raise ValueError("one rank has nothing to split along the sequence")

    @property
    def shards(self) -> int:
        """The number of parts of a sequence between the layers' matrix products."""
        return self.mesh.size("tp") if self.sequence_parallel else 1

    @property
    def shard(self) -> int:
        """The index of this rank's part of the sequence."""
        return self.mesh.coordinate("tp") if self.sequence_parallel else 0

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the tokens between the layers' matrix products.

        A sum over a rank's tokens is partial over these axes.
        """
        return ("dp", "cp", *AXES["heads"]) if self.sequence_parallel else ("dp", "cp")

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the tokens of one sample between the layers' matrix products."""
        return self.token_axes[1:]

    def ranks_per_sample(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return, for each sample whose tokens these ranks have, how many of them share it."""
        apart = [axis for axis in DENSE_AXES if axis not in self.sample_axes]
        where = map(self.mesh.coordinates_of, ranks)
        return tuple(Counter(tuple(at[axis] for axis in apart) for at in where).values())

    def group(self, *meanings: Meaning) -> Group:
        """Return the group of ranks that split dimensions of these meanings."""
        return self.mesh.group(*(axis for meaning in meanings for axis in AXES[meaning]))

    def products(self, *, rows: Group = ALONE, columns: Group = ALONE) -> Products:
        """Return the products of a linear layer whose outputs (rows) or inputs (columns) these ranks split."""
        if self.rounding is None:
            return PLAIN
        sharers = ALONE if self.rounding.recipe.block else self.mesh.group("cp", *AXES["heads"])
        return RoundedProducts(self.rounding, rows, columns, sharers)

    def split(
        self, tensor: LogicalTensor, dimensions: Mapping[int, Meaning], *, columns: int = 1, padded: int | None = None
    ) -> Sharding:
        """Split a tensor by the meaning of its dimensions. `columns` and `padded` are those of `placement.split`."""
        splits = {dimension: AXES[meaning] for dimension, meaning in dimensions.items()}
        return placement.split(self.mesh, tensor, splits, columns=columns, padded=padded)

    def shared(self, tensor: LogicalTensor, groups: range, sharers: tuple[int, ...], *, columns: int = 1) -> Sharding:
        """Place groups of a tensor [groups, ...], each of which serves consecutive heads.

        Args:
            sharers: the ranks that have these groups, for different heads. If they are several, each computes a part of
                the gradient.
            columns: that of `placement.split`.
        """
        size = (len(groups), *tensor.shape[1:])
        cut = len(size) - columns
        rows = math.prod(size[:cut])
        box = Box((groups.start, *(0,) * (len(size) - 1)), size)
        piece = Piece(tensor, box, 0, rows, tuple((0, axis) for axis in AXES["heads"]))
        shape = (rows, math.prod(size[cut:])) if columns else (rows,)
        return Sharding(shape, (piece,), sharers, grad_is_partial=len(sharers) > 1)

    def replicated(self, tensor: LogicalTensor, *, of_part: bool = False, columns: int | None = None) -> Sharding:
        """Replicate a tensor on every rank.

        Args:
            of_part: True if each rank applies it to only a part of the activations even without sequence parallelism,
                for example to its own heads. Its gradient is then partial.
            columns: that of `placement.replicated`.
        """
        is_partial = of_part or self.sequence_parallel
        return placement.replicated(self.mesh, tensor, grad_is_partial=is_partial, columns=columns)

    def parameter(self, sharding: Sharding) -> Parameter:
        """Create a parameter on this rank's device. Its values are not set yet."""
        wide = any(piece.tensor.fp32 for piece in sharding.pieces)
        dtype = torch.promote_types(self.dtype, torch.float32) if wide else self.dtype
        return Parameter(sharding, dtype, self.mesh.device)

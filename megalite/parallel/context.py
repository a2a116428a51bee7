"""The mesh, the split of activations and the dtype of weights, which all layers of a network share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from megalite.parallel import placement
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.sharding import LogicalTensor, Sharding

Meaning = Literal["heads", "ffn", "vocabulary"]
AXES: Mapping[Meaning, tuple[str, ...]] = {"heads": ("tp",), "ffn": ("tp",), "vocabulary": ("tp",)}
"""Meaning of a dimension of a logical tensor -> the axes of the mesh that split it."""


@dataclass(frozen=True)
class ParallelContext:
    """Facts about its rank that a layer needs; layers ask by what a dimension means, never by the name of an axis.

    Attributes:
        sequence_parallel: between the layers' products, activations are split along the sequence over the ranks that
            split heads and inner widths.
        dtype: of weights and activations.
    """

    mesh: ParallelMesh
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.mesh.size("tp") == 1:
            raise ValueError("one rank has nothing to split along the sequence")

    @property
    def shards(self) -> int:
        """Parts of a sequence between the layers' products."""
        return self.mesh.size("tp") if self.sequence_parallel else 1

    @property
    def shard(self) -> int:
        """The number of this rank's part."""
        return self.mesh.coordinate("tp") if self.sequence_parallel else 0

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes of the mesh that split the tokens between the layers' products: over them sums of tokens are partial."""
        return ("dp", "cp", *AXES["heads"]) if self.sequence_parallel else ("dp", "cp")

    def group(self, meaning: Meaning) -> Group:
        """The ranks that share such a dimension among them."""
        return self.mesh.group(*AXES[meaning])

    def split(
        self, tensor: LogicalTensor, dimensions: Mapping[int, Meaning], *, columns: int = 1, padded: int | None = None
    ) -> Sharding:
        """Place a tensor by what its dimensions mean; `columns` and `padded` are those of `placement.split`."""
        splits = {dimension: AXES[meaning] for dimension, meaning in dimensions.items()}
        return placement.split(self.mesh, tensor, splits, columns=columns, padded=padded)

    def replicated(self, tensor: LogicalTensor, *, of_part: bool = False) -> Sharding:
        """Place the whole of a vector on every rank.

        `of_part`: each rank applies it to a part of the activations whatever the sequence does, as to its own heads.
        """
        return placement.replicated(self.mesh, tensor, grad_is_partial=of_part or self.sequence_parallel)

    def parameter(self, sharding: Sharding) -> Parameter:
        """A parameter on this rank's device, its values not yet set."""
        return Parameter(sharding, self.dtype, self.mesh.device)

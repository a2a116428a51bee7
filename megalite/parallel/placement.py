"""The usual placements of a logical tensor on a mesh, as `Sharding` records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sharding import Box, LogicalTensor, Piece, Sharding, partition_range

DENSE, EXPERT = ("tp",), ("ep", "etp")
"""The axes of each mesh view that split one data-parallel replica of a stage."""


def replicated(
    mesh: ParallelMesh, tensor: LogicalTensor, *, grad_is_partial: bool, columns: int | None = None
) -> Sharding:
    """Replicate a tensor on every tensor-parallel rank of a stage.

    Args:
        grad_is_partial: True if each rank applies it to only a part of the activations: its slice of the sequence, or
            its own heads.
        columns: as in `split`; None: all dimensions but the first.
    """
    columns = len(tensor.shape) - 1 if columns is None else columns
    return replace(split(mesh, tensor, {}, columns=columns), grad_is_partial=grad_is_partial)


def split(
    mesh: ParallelMesh,
    tensor: LogicalTensor,
    splits: Mapping[int, tuple[str, ...]],
    *,
    columns: int = 1,
    padded: int | None = None,
) -> Sharding:
    """Split each dimension in `splits` into equal parts over the ranks of its axes.

    The tensor is replicated over the remaining axes of the stage, and each replica computes the full gradient.

    Args:
        splits: the mesh axes that split each dimension. All axes belong to one view of the mesh.
        columns: the number of last dimensions that become the columns of the local matrix. 0 makes a vector.
        padded: the padded length of the first dimension, which is divided over the ranks. Rows past the true length
            are padding.

    Raises:
        ValueError: an axis does not split weights or is given twice, axes are of two views, or a dimension does not
            divide evenly.
    """
    used = [axis for axes in splits.values() for axis in axes]
    if len(set(used)) < len(used) or not any(set(used) <= set(axes) for axes in (DENSE, EXPERT)):
        raise ValueError(
            f"{tensor.name} split over {dict(splits)}: give each axis once, all of {DENSE} or all of {EXPERT}"
        )
    offset, size, local = [0] * len(tensor.shape), list(tensor.shape), list(tensor.shape)
    for dimension, axes in splits.items():
        length = padded if padded is not None and dimension == 0 else tensor.shape[dimension]
        if length % mesh.size(*axes):
            raise ValueError(
                f"dimension {dimension} of {tensor.name}, {length} long, cannot be divided among {mesh.size(*axes)} "
                f"ranks of {' x '.join(axes)}: refuse such a size with the flags, or pad it"
            )
        start, local[dimension] = partition_range(length, mesh.size(*axes), mesh.ranks(*axes).index(mesh.rank))
        offset[dimension] = min(start, tensor.shape[dimension])
        size[dimension] = min(start + local[dimension], tensor.shape[dimension]) - offset[dimension]
    cut = len(local) - columns
    local_shape = (math.prod(local[:cut]), math.prod(local[cut:])) if columns else (math.prod(local),)
    expert = not set(used).isdisjoint(EXPERT)
    free = [axis for axis in (EXPERT if expert else DENSE) if axis not in used]
    made = tuple((dimension, axis) for dimension, axes in splits.items() for axis in axes)
    piece = Piece(tensor, Box(tuple(offset), tuple(size)), 0, math.prod(size[:cut]), made)
    return Sharding(local_shape, (piece,), mesh.ranks(*free), grad_is_partial=False, expert=expert)


def stacked(shardings: list[Sharding]) -> Sharding:
    """Stack several placements into one local parameter, along its rows. All must have the same replica ranks."""
    pieces: list[Piece] = []
    row = 0
    for sharding in shardings:
        pieces += [replace(piece, row=piece.row + row) for piece in sharding.pieces]
        row += sharding.local_shape[0]
    return replace(shardings[0], local_shape=(row, *shardings[0].local_shape[1:]), pieces=tuple(pieces))

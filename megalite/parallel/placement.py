"""The usual placements of a logical tensor on a mesh, as `Sharding` records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sharding import Box, LogicalTensor, Piece, Sharding, partition_range

DENSE, EXPERT = ("tp",), ("ep", "etp")
"""Axes of either view over which a data-parallel replica of a stage is split."""


def whole(tensor: LogicalTensor) -> Box:
    return Box.whole(tensor.shape)


def replicated(mesh: ParallelMesh, tensor: LogicalTensor, *, grad_is_partial: bool) -> Sharding:
    """The whole of a vector on every rank of a replica of the stage.

    `grad_is_partial`: each of them sees only a part of what the vector acts on, its slice of the sequence or its heads.
    """
    return Sharding(
        tensor.shape, (Piece(tensor, whole(tensor), 0, tensor.shape[0]),), mesh.ranks(*DENSE), grad_is_partial
    )


def split(
    mesh: ParallelMesh,
    tensor: LogicalTensor,
    splits: Mapping[int, tuple[str, ...]],
    *,
    columns: int = 1,
    padded: int | None = None,
) -> Sharding:
    """An equal part of each dimension in `splits` on each rank along its axes, all of one view of the mesh.

    The ranks of a replica of the stage along other axes hold copies, each with the whole gradient.

    Args:
        columns: the box stands in a local matrix whose columns are so many last dimensions (0: a vector).
        padded: the first dimension is dealt as if it had this length; what lies past the true one is padding.

    Raises ValueError for axes that do not cut weights, or cut them twice, and where parts would not be equal.
    """
    used = [axis for axes in splits.values() for axis in axes]
    if len(set(used)) < len(used) or not any(set(used) <= set(axes) for axes in (DENSE, EXPERT)):
        raise ValueError(
            f"{tensor.name} split over {dict(splits)}: give each axis once, all of {DENSE} or all of {EXPERT}"
        )
    box, local, true_rows = whole(tensor), tensor.shape, None
    for dimension, axes in splits.items():
        padding = padded if dimension == 0 else None
        length = tensor.shape[dimension] if padding is None else padding
        if length % mesh.size(*axes):
            raise ValueError(
                f"dimension {dimension} of {tensor.name}, {length} long, does not divide over {mesh.size(*axes)} ranks "
                f"of {' x '.join(axes)}: refuse such a size with the flags, or pad it"
            )
        start, count = partition_range(length, mesh.size(*axes), mesh.ranks(*axes).index(mesh.rank))
        true_start = min(start, tensor.shape[dimension])
        true_count = min(start + count, tensor.shape[dimension]) - true_start
        box = Box(_set(box.offset, dimension, true_start), _set(box.size, dimension, true_count))
        local = _set(local, dimension, count)
        if padding is not None:
            true_rows = true_count
    cut = len(local) - columns
    local_shape = (math.prod(local[:cut]), math.prod(local[cut:])) if columns else (math.prod(local),)
    expert = not set(used).isdisjoint(EXPERT)
    free = [axis for axis in (EXPERT if expert else DENSE) if axis not in used]
    made = tuple((dimension, axis) for dimension, axes in splits.items() for axis in axes)
    piece = Piece(tensor, box, 0, local_shape[0] if true_rows is None else true_rows, made)
    return Sharding(local_shape, (piece,), mesh.ranks(*free), grad_is_partial=False, expert=expert)


def stacked(shardings: list[Sharding]) -> Sharding:
    """Several placements with the same copies as one local parameter, one under the other."""
    pieces: list[Piece] = []
    row = 0
    for sharding in shardings:
        pieces += [replace(piece, row=piece.row + row) for piece in sharding.pieces]
        row += sharding.local_shape[0]
    return replace(shardings[0], local_shape=(row, *shardings[0].local_shape[1:]), pieces=tuple(pieces))


def _set(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])

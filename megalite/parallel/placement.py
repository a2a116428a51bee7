"""The usual placements of a logical tensor on a mesh, as `Sharding` records."""

from __future__ import annotations

import math
from dataclasses import replace

from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sharding import Box, LogicalTensor, Piece, Sharding, share


def whole(tensor: LogicalTensor) -> Box:
    return Box.whole(tensor.shape)


def replicated(mesh: ParallelMesh, tensor: LogicalTensor, *, summed: bool) -> Sharding:
    """The whole of a vector on every tensor-parallel rank.

    `summed` where each of them sees only a part of what the vector acts on: its slice of the sequence, or its heads.
    """
    return Sharding(tensor.shape, (Piece(tensor, whole(tensor), 0, tensor.shape[0]),), mesh.ranks("tp"), summed)


def split(
    mesh: ParallelMesh, tensor: LogicalTensor, dimension: int, *, columns: int = 1, padded: int | None = None
) -> Sharding:
    """An equal part of `dimension` on each tensor-parallel rank.

    The box stands in a local matrix whose columns are the last `columns` dimensions (0: a vector). With `padded`, the
    first dimension is dealt as if it had that length; what lies past the true one is padding.
    """
    length = tensor.shape[dimension] if padded is None else padded
    start, count = share(length, mesh.size("tp"), mesh.coordinate("tp"))
    true_start = min(start, tensor.shape[dimension])
    true_count = min(start + count, tensor.shape[dimension]) - true_start
    box = whole(tensor)
    box = Box(_set(box.offset, dimension, true_start), _set(box.size, dimension, true_count))
    local = _set(tensor.shape, dimension, count)
    cut = len(local) - columns
    local_shape = (math.prod(local[:cut]), math.prod(local[cut:])) if columns else (math.prod(local),)
    rows = local_shape[0] if padded is None else true_count
    return Sharding(local_shape, (Piece(tensor, box, 0, rows, ((dimension, "tp"),)),), (mesh.rank,), summed=False)


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

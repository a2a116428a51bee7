"""State of Adafactor: averages of squared gradients over the rows and over the columns of each matrix."""

from __future__ import annotations

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.sharding import Box, Constant, LogicalTensor, Piece, Sharding
from megalite.parallel.state import State

ROWS, COLUMNS = "exp_avg_sq_row", "exp_avg_sq_col"
"""Names of the averages: one number per row, and one per column."""


def lengths(tensor: LogicalTensor) -> tuple[int, int, int]:
    """Return the number of matrices, of their rows and of their columns."""
    matrices, rows, columns = map(len, tensor.matrix_indices(Box.whole(tensor.shape)))
    return matrices, rows, columns


def keeps_averages(piece: Piece) -> bool:
    """Return True if a rank with this piece keeps the averages of its matrices: it has their first elements."""
    if piece.tensor.matrices is None or not piece.box.numel:
        return False
    numbered = piece.tensor.matrix_dimensions
    return not any(at for dimension, at in enumerate(piece.box.offset) if dimension not in numbered)


def average_of_rows(config: OptimizerConfig, parameter: Parameter, mesh: ParallelMesh) -> State | None:
    """Return the averages of the rows of a parameter's matrices, if this rank keeps them."""
    return _averages(parameter, mesh, 1)


def average_of_columns(config: OptimizerConfig, parameter: Parameter, mesh: ParallelMesh) -> State | None:
    """Return the averages of the columns of a parameter's matrices, if this rank keeps them."""
    return _averages(parameter, mesh, 2)


def _averages(parameter: Parameter, mesh: ParallelMesh, axis: int) -> State | None:
    """Return averages [matrices, size along `axis`] of the matrices whose first elements are here, or None."""
    record = parameter.sharding
    pieces: list[Piece] = []
    stop = 0
    for piece in filter(keeps_averages, record.pieces):
        sizes, (numbers, _, _) = lengths(piece.tensor), piece.tensor.matrix_indices(piece.box)
        tensor = LogicalTensor(piece.tensor.name, (sizes[0], sizes[axis]), Constant(0.0), weight_decay=False)
        box = Box((numbers[0], 0), (len(numbers), sizes[axis]))
        pieces.append(Piece(tensor, box, stop, box.numel))
        stop += box.numel
    if not pieces:
        return None
    place = Sharding((stop,), tuple(pieces), record.replica_ranks, grad_is_partial=False, expert=record.expert)
    return State(place, torch.promote_types(parameter.dtype, torch.float32), mesh.device)

"""PowerSGD: gradients of matrices as products of two thin ones (arXiv:1905.13727), on batches of matrices.

    p = project(M, q)             sum over ranks
    p = orthogonalize(p)
    q = project_back(M, p)        sum over ranks
    M is restored as p q^T        the residual is M - p q^T, and q starts the next step

All of it is in the dtype of the gradients. M may also be the sum over ranks, since both products are linear in it. A
rank as large as the matrix's smaller side restores it, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.optim.layout import BucketLayout
from megalite.synchronization.hashing import mixed


def matrix_shape(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Return rows and columns of the view in which a parameter is compressed, or None if it is sent as it is.

    Rows are the first dimension (a layer's outputs), columns all others. Vectors are sent as they are, and matrices
    whose two factors would not be smaller.
    """
    if len(shape) < 2:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if rank * (rows + columns) < rows * columns else None


def matrices_of(layout: BucketLayout, rank: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return the ranges of a bucket's matrices that are compressed, by their rows and columns.

    The last two dimensions of a parameter are a matrix, all others count matrices (experts).
    """
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for slot in layout.slots:
        shape = matrix_shape(slot.parameter.shape[-2:], rank)
        if shape is not None:
            size = math.prod(shape)
            ranges = [(start, start + size) for start in range(slot.start, slot.stop, size)]
            found.setdefault(shape, []).extend(ranges)
    return found


def first_factor(matrices: int, columns: int, rank: int, key: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw q [matrices, columns, rank] for the first step: uniform numbers from -1 to 1, a function of the key."""
    bits = mixed(torch.arange(matrices * columns * rank, device=device), key) >> 10
    return ((bits.to(torch.float64) + 0.5) * 2.0**-52 - 1.0).to(dtype).view(matrices, columns, rank)


def project(matrices: Tensor, q: Tensor) -> Tensor:
    """Return p = M q [matrices, rows, rank] of M [matrices, rows, columns] and q [matrices, columns, rank]."""
    return matrices @ q


def orthogonalize(p: Tensor) -> Tensor:
    """Return orthonormal columns that span those of p [matrices, rows, rank], rank at most rows.

    They are Householder's, and so orthonormal even where those of p depend on each other or are zero. A matrix with an
    infinity or a NaN becomes NaN.
    """
    size = p.abs().amax((1, 2), keepdim=True)
    usable = size.isfinite()
    scaled = torch.where(usable, p, 0.0) / torch.where(usable & (size > 0.0), size, 1.0)
    return torch.where(usable, torch.linalg.qr(scaled).Q, math.nan)


def project_back(matrices: Tensor, p: Tensor) -> Tensor:
    """Return q = M^T p [matrices, columns, rank] of M [matrices, rows, columns] and p [matrices, rows, rank]."""
    return matrices.mT @ p


def restored(p: Tensor, q: Tensor) -> Tensor:
    """Return p q^T [matrices, rows, columns]."""
    return p @ q.mT


def subtract_restored_(matrices: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Subtract p q^T from M [matrices, rows, columns] in place, which leaves the residual."""
    return matrices.baddbmm_(p, q.mT, alpha=-1)

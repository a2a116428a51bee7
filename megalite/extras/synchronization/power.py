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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.extras.synchronization.hashing import mixed
from megalite.optim.layout import BucketLayout


def matrix_shape(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Return rows and columns of the view in which a parameter is compressed, or None if it is sent as it is.

    Rows are the first dimension (a layer's outputs), columns all others. Vectors are sent as they are, and matrices
    whose two factors would not be smaller.
    """
    if len(shape) < 2:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if rank * (rows + columns) < rows * columns else None


@dataclass(frozen=True)
class Matrices:
    """Matrices of one shape, at equal distances in a bucket, which are compressed together."""

    count: int
    rows: int
    columns: int
    start: int
    """Position of the first matrix in the bucket."""
    distance: int
    """Number of elements from the start of one matrix to that of the next."""

    @property
    def size(self) -> int:
        """Number of elements of each matrix."""
        return self.rows * self.columns

    @property
    def starts(self) -> range:
        """Positions of the matrices in the bucket."""
        return range(self.start, self.start + self.count * self.distance, self.distance)

    def of(self, bucket: Tensor) -> Tensor:
        """Return the matrices in the elements [length] of a bucket, as a view [count, rows, columns]."""
        strides, start = (self.distance, self.columns, 1), bucket.storage_offset() + self.start
        return bucket.as_strided((self.count, self.rows, self.columns), strides, start)


def matrices_of(layout: BucketLayout, rank: int) -> list[Matrices]:
    """Return the matrices of a bucket that are compressed.

    The last two dimensions of a parameter are a matrix, all others count matrices (experts).
    """
    starts: dict[tuple[int, int], list[int]] = {}
    for slot in layout.slots:
        shape = matrix_shape(slot.parameter.shape[-2:], rank)
        if shape is not None:
            starts.setdefault(shape, []).extend(range(slot.start, slot.stop, math.prod(shape)))
    ranges = [(shape, some) for shape, positions in starts.items() for some in _ranges(positions)]
    return [Matrices(len(some), *shape, some.start, some.step) for shape, some in ranges]


def _ranges(numbers: list[int]) -> Iterator[range]:
    """Divide ascending numbers, in order, into ranges as long as possible."""
    while numbers:
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        count = next((i for i, number in enumerate(numbers) if number != numbers[0] + i * step), len(numbers))
        yield range(numbers[0], numbers[0] + count * step, step)
        numbers = numbers[count:]


def first_factor(matrices: int, columns: int, rank: int, key: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw q [matrices, columns, rank] for the first step: uniform numbers from -1 to 1, a function of the key."""
    bits = mixed(torch.arange(matrices * columns * rank, device=device), key) >> 10
    return ((bits.to(torch.float64) + 0.5) * 2.0**-52 - 1.0).to(dtype).view(matrices, columns, rank)


def project(matrices: Tensor, q: Tensor) -> Tensor:
    """Return p = M q [matrices, rows, rank] of M [matrices, rows, columns] and q [matrices, columns, rank]."""
    return (q.mT @ matrices.mT).mT  # on CPU twice as fast as M q


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
    return (p.mT @ matrices).mT  # on CPU ten times as fast as M^T p


def restore(p: Tensor, q: Tensor, out: Tensor) -> Tensor:
    """Return p q^T [matrices, rows, columns], written to `out`."""
    return torch.bmm(p, q.mT, out=out)


def restore_from(begin: int, p: Tensor, q: Tensor, out: Tensor) -> None:
    """Write elements of p q^T, in row-major order from the one numbered `begin` on, to the flat tensor `out`.

    p: [rows, rank]; q: [columns, rank].
    """
    columns = len(q)
    row, column = divmod(begin, columns)
    if column:
        head = min(columns - column, len(out))
        torch.mv(q[column : column + head], p[row], out=out[:head])
        row, out = row + 1, out[head:]
    rows = len(out) // columns
    torch.mm(p[row : row + rows], q.mT, out=out[: rows * columns].view(rows, columns))
    tail = len(out) - rows * columns
    if tail:
        torch.mv(q[:tail], p[row + rows], out=out[rows * columns :])

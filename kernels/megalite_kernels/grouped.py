"""Grouped matrix products: rows in consecutive groups, each with a matrix of its own.

`ends` [groups], int32, has the end of each group's rows; the last end is the number of rows, and a group may be empty.
On a GPU that has torch's grouped product for the dtype, none of these waits for the device. Elsewhere they are a loop
over the groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 16
"""Bytes of which the widths must be multiples for torch's grouped product."""


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group's rows by its matrix: [rows, in] and [groups, out, in] to [rows, out]."""
    return _grouped(rows, weights.transpose(1, 2), ends)


def grouped_input_gradient(gradient: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of `grouped_product`'s rows: [rows, out] and [groups, out, in] to [rows, in]."""
    return _grouped(gradient, weights, ends)


def grouped_weight_gradient(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of `grouped_product`'s matrices: [rows, out] and [rows, in] to [groups, out, in].

    That of a group without rows is zero.
    """
    if _has_kernel(gradient, gradient.shape[1], rows.shape[1]):
        return F.grouped_mm(gradient.contiguous().t(), rows.contiguous(), offs=ends)
    output = gradient.new_empty(len(ends), gradient.shape[1], rows.shape[1])
    for group, part in _parts(ends):
        torch.mm(gradient[part].t(), rows[part], out=output[group])
    return output


def _grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    if _has_kernel(rows, *matrices.shape[1:]):
        return F.grouped_mm(rows.contiguous(), matrices, offs=ends)
    output = rows.new_empty(len(rows), matrices.shape[2])
    for group, part in _parts(ends):
        torch.mm(rows[part], matrices[group], out=output[part])
    return output


def _parts(ends: Tensor) -> Iterator[tuple[int, slice]]:
    begin = 0
    for group, end in enumerate(ends.tolist()):
        yield group, slice(begin, end)
        begin = end


def _has_kernel(rows: Tensor, *widths: int) -> bool:
    """Tell if torch's grouped product takes these. It has no float64, and before SM90 it is a loop that waits."""
    return (
        rows.device.type == "cuda"
        and rows.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(rows.device) >= (9, 0)
        and all(width * rows.element_size() % ALIGNMENT == 0 for width in widths)
    )

"""Products of rows, sorted by group, with one matrix per group, for the experts of a layer.

On GPUs, each product in bf16 and fp16 is one launch, whatever the number of groups. On NVIDIA GPUs from compute
capability 9.0 on, `F.grouped_mm` multiplies rows in bf16 with matrices whose widths are multiples of 16 bytes; Triton's
kernels do the rest. They also compute the gradients of the matrices, which are added to the sum of earlier ones without
rounding first: torch has no operator for that. In other dtypes and on CPUs, there is one product per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.implementation import current, on_gpu
from megalite_kernels.launch import chunk_elements
from megalite_kernels.products import add_product


def grouped_product(rows: Tensor, matrices: Tensor, offsets: Sequence[int], ends: Tensor) -> Tensor:
    """Multiply each row with the matrix of its group: [rows, in] and [groups, in, out] to [rows, out].

    Args:
        offsets: [groups + 1], from 0 to the number of rows: group g has the rows from offsets[g] to offsets[g + 1].
        ends: offsets[1:] as an int32 tensor on the device.
    """
    if len(rows) and _takes_grouped_mm(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=ends)
    if len(rows) and _runs_triton(rows, matrices):
        from megalite_kernels.grouped_kernels import launch_products

        return launch_products(rows, matrices, ends)
    output = rows.new_empty(len(rows), matrices.shape[2])
    for matrix, (start, stop) in zip(matrices, pairwise(offsets), strict=True):
        torch.mm(rows[start:stop], matrix, out=output[start:stop])
    return output


def add_grouped_products(
    target: Tensor, gradients: Tensor, rows: Tensor, offsets: Sequence[int], ends: Tensor, *, overwrite: bool
) -> None:
    """Add gradients.T @ rows of each group to its matrix: [rows, out] and [rows, in] to `target` [groups, out, in].

    The matrix of a group without rows stays as it is.

    Args:
        offsets, ends: see `grouped_product`.
        overwrite: write the products, and zeros for groups without rows, instead of adding.
    """
    if _runs_triton(gradients, rows):
        from megalite_kernels.grouped_kernels import launch_sums

        launch_sums(target, gradients, rows, ends, overwrite=overwrite)
        return
    for matrix, (start, stop) in zip(target, pairwise(offsets), strict=True):
        if start < stop:
            add_product(matrix, gradients[start:stop], rows[start:stop], overwrite=overwrite)
        elif overwrite:
            matrix.zero_()


def scale_gradients_(gradients: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
    """Multiply the gradients of scale * row in place with the scale, which makes them those of the rows.

    Args:
        gradients, rows: [rows, width].
        scale: [rows], in fp32 or wider.

    Returns:
        The gradients of the scale, [rows]: the dot product of each row and its gradient.
    """
    if current().runs_triton("grouped", gradients, rows, scale):
        from megalite_kernels.grouped_kernels import launch_scale

        return launch_scale(gradients, rows, scale)
    size = max(1, chunk_elements(rows.device) // rows.shape[1])  # for small temporaries
    pairs = zip(gradients.split(size), rows.split(size), strict=True)
    dots = torch.cat([torch.linalg.vecdot(one.to(scale.dtype), other.to(scale.dtype)) for one, other in pairs])
    torch.mul(gradients, scale[:, None], out=gradients)
    return dots


def _runs_triton(first: Tensor, second: Tensor) -> bool:
    half = first.dtype == second.dtype and first.dtype in (torch.bfloat16, torch.float16)
    return half and current().runs_triton("grouped", first, second)


def _takes_grouped_mm(rows: Tensor, matrices: Tensor) -> bool:
    return (
        on_gpu(rows)
        and torch.version.hip is None
        and current().choice != "reference"
        and "grouped" not in current().to_reference
        and rows.dtype == matrices.dtype == torch.bfloat16
        and all(width * rows.element_size() % 16 == 0 for width in matrices.shape[1:])
        and (rows.is_meta or torch.cuda.get_device_capability(rows.device) >= (9, 0))  # plans are of such GPUs
    )

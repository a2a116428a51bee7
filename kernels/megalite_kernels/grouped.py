"""Products of rows, sorted by group, with one matrix per group, for the experts of a layer.

On NVIDIA GPUs from compute capability 9.0 on, one call of `F.grouped_mm` computes all groups in bf16. Elsewhere, and
for widths that are not multiples of 16 bytes, there is one product per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.implementation import current, on_gpu


def grouped_product(rows: Tensor, matrices: Tensor, offsets: Sequence[int], ends: Tensor) -> Tensor:
    """Multiply each row with the matrix of its group: [rows, in] and [groups, in, out] to [rows, out].

    Args:
        offsets: [groups + 1], from 0 to the number of rows: group g has the rows from offsets[g] to offsets[g + 1].
        ends: offsets[1:] as an int32 tensor on the device.
    """
    if len(rows) and _takes_grouped_mm(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=ends)
    output = rows.new_empty(len(rows), matrices.shape[2])
    for matrix, (start, stop) in zip(matrices, pairwise(offsets), strict=True):
        torch.mm(rows[start:stop], matrix, out=output[start:stop])
    return output


def _takes_grouped_mm(rows: Tensor, matrices: Tensor) -> bool:
    return (
        on_gpu(rows)
        and torch.version.hip is None
        and current().choice != "reference"
        and rows.dtype == matrices.dtype == torch.bfloat16
        and all(width * rows.element_size() % 16 == 0 for width in matrices.shape[1:])
        and (rows.is_meta or torch.cuda.get_device_capability(rows.device) >= (9, 0))  # plans are of such GPUs
    )

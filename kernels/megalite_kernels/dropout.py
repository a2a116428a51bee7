"""Dropout by position: an element's position in its sample decides whether it is dropped, not the rank that holds it.

Each sample has a tensor [rows, width] at each random site of each layer. Element i, in row-major order, is dropped if
its random 16-bit number is below round(65536 * probability). The numbers are the outputs, in little-endian order, of
Philox-4x64-10 (Salmon et al., SC'11) with the key (seed, 0) for the counters (1, sample, layer, site),
(2, sample, layer, site) and so on, as in numpy's Philox. Kept elements are divided by the expected share of kept
elements.

The mask is therefore the same on every device and in every dtype, and any part of it can be drawn without the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalite_kernels.dropout_mask import GROUP, DropoutMask
from megalite_kernels.implementation import current
from megalite_kernels.products import changed

# ------------------------------------------------------------------------------------------------- the reference


def kept_reference(shape: torch.Size, dimension: int, mask: DropoutMask) -> Tensor:
    """Return a mask of this shape: 1 for kept elements, 0 for dropped ones, in uint8 on the CPU.

    `dimension`: the dimension of the samples.
    """
    kept = np.empty(shape, dtype=np.bool_)
    width, threshold, runs = shape[-1], mask.threshold, list(mask.runs())
    by_sample = np.moveaxis(kept, dimension, 0)
    for sample, own in zip(mask.samples, by_sample, strict=True):
        for here, run in runs:
            first, skipped = divmod(run.start * width, GROUP)
            counter = np.array([first, sample, mask.layer, mask.site], dtype=np.uint64)  # numpy adds 1 before it draws
            source = np.random.Philox(counter=counter, key=np.array([mask.seed, 0], dtype=np.uint64))
            groups = -(-(skipped + len(run) * width) // GROUP)
            drawn = source.random_raw(groups * GROUP // 4).view(np.uint16)[skipped : skipped + len(run) * width]
            np.greater_equal(drawn.reshape(len(run), width), threshold, out=own[here])
    return torch.from_numpy(kept.view(np.uint8))


class _DroppedReference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, dimension: int, mask: DropoutMask) -> Tensor:
        kept = kept_reference(input.shape, dimension, mask).to(input.device)
        ctx.save_for_backward(kept)
        ctx.scale = mask.scale
        return _masked(input, kept, ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return _masked(grad_output, kept, ctx.scale), None, None


def _masked(input: Tensor, kept: Tensor, scale: float) -> Tensor:
    # Multiply by the scale last: inside a bf16 mask it would be rounded.
    return changed(changed(kept.to(input.dtype), "mul", input), "mul", scale)


# ------------------------------------------------------------------------------------------------- public functions


def drop(input: Tensor, mask: DropoutMask, *, dimension: int) -> Tensor:
    """Zero the elements of `input` that the mask drops, and scale the rest.

    Args:
        input: [rows, samples, width], or [samples, rows, width].
        dimension: the dimension of the samples, 1 or 0.

    Raises:
        ValueError: the numbers of rows or samples do not match the mask.
    """
    if sum(map(len, mask.rows)) != input.shape[1 - dimension] or len(mask.samples) != input.shape[dimension]:
        raise ValueError(
            f"{len(mask.samples)} samples and the rows {mask.rows} for a tensor {list(input.shape)} of samples along "
            f"dimension {dimension}"
        )
    if input.shape[-1] % GROUP == 0 and current().runs_triton("dropout", input):
        from megalite_kernels.dropout_kernels import Dropped

        dropped: Tensor = Dropped.apply(input, dimension, mask)
    else:
        dropped = _DroppedReference.apply(input, dimension, mask)
    return dropped

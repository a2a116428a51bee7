"""AdamW and SGD with momentum over flat buffers, in place. One launch reads and writes each tensor once.

The gradient g is first multiplied by a factor, which clips it and removes the loss scale. AdamW (arXiv:1711.05101),
with moments m and v, learning rate r, weight decay d and step number t:

    m = m + (1 - beta1) (g - m)      v = beta2 v + (1 - beta2) g^2
    w = (1 - r d) w - r / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)

SGD: m = momentum m + (g + d w), w = w - r m. Without momentum, m is g + d w.

Arithmetic is in fp32 or wider, and the stored results are rounded. Constants are computed in double precision. There
are three ways to store weights: the parameters are their own masters, or they are rounded from masters of another
dtype, or they are bf16 with int16 remainders of fp32 masters (`master_weights`). Moments have any dtype, or 8 bits
(`moments`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalite_kernels import launch
from megalite_kernels.implementation import current
from megalite_kernels.master_weights import keep_weights_, wide_weights
from megalite_kernels.moments import Quantized
from megalite_kernels.updates import SGD, AdamW, Flat, Moment

# ------------------------------------------------------------------------------------------------- the reference


def update_reference_(flat: Flat, moments: Sequence[Moment], by: AdamW | SGD) -> None:
    """Update weights and moments as `update_` does, a chunk at a time."""
    for gradient, weight, values in _chunks(flat, moments, by):
        if isinstance(by, AdamW):
            mean, square = values
            mean.lerp_(gradient, 1.0 - by.beta1)
            square.mul_(by.beta2).addcmul_(gradient, gradient, value=1.0 - by.beta2)
            root = square.sqrt().div_(math.sqrt(1.0 - by.beta2**by.step)).add_(by.epsilon)
            weight.mul_(1.0 - by.rate * by.decay).addcdiv_(mean, root, value=-by.rate / (1.0 - by.beta1**by.step))
        else:
            change = gradient.add(weight, alpha=by.decay)
            for mean in values:  # one, or none
                change = mean.mul_(by.momentum).add_(change)
            weight.add_(change, alpha=-by.rate)


def _chunks(flat: Flat, moments: Sequence[Moment], by: AdamW | SGD) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
    """Yield chunks that fit in the cache: gradients, weights and moments in fp32 or wider.

    The caller changes weights and moments in place, and they are stored before the next chunk.
    """
    wide = torch.promote_types(flat.parameters.dtype, torch.float32)
    size = launch.chunk_elements(flat.parameters.device)
    for start in range(0, len(flat.parameters), size):
        part = flat.part(start, min(start + size, len(flat.parameters)))
        gradients, weights = part.gradients.to(wide), wide_weights(part.parameters, part.master)
        values = [_read(moment, start, start + len(gradients)).to(wide) for moment in moments]
        yield gradients if by.factor == 1.0 else gradients * by.factor, weights, values
        keep_weights_(weights, part.parameters, part.master)
        for number, (moment, value) in enumerate(zip(moments, values, strict=True)):
            if isinstance(moment, Quantized):
                moment.set(value, start, seed=by.seed + number, offset=part.first)
            else:
                moment[start : start + size].copy_(value)  # a no-op if it is the same memory


def _read(moment: Moment, start: int, stop: int) -> Tensor:
    return moment.read(start, stop) if isinstance(moment, Quantized) else moment[start:stop]


# ------------------------------------------------------------------------------------------------- public functions


@torch.no_grad()
def update_(flat: Flat, moments: Sequence[Moment], by: AdamW | SGD) -> None:
    """Update weights and moments, each [elements], in place.

    Args:
        moments: of AdamW the average and the squares, of SGD the momentum, or nothing if it is not used.

    Raises:
        ValueError: a tensor is not flat and contiguous, or the lengths differ.
    """
    values = [moment.codes if isinstance(moment, Quantized) else moment for moment in moments]
    tensors = [tensor for tensor in (*flat[:3], *values) if tensor is not None]
    for tensor in tensors:
        if tensor.dim() != 1 or not tensor.is_contiguous() or len(tensor) != len(flat.parameters):
            raise ValueError("an update needs flat, contiguous tensors of the same length")
    if not current().runs_triton("optimizer", *tensors):
        update_reference_(flat, moments, by)
        return
    from megalite_kernels.optimizer_kernels import launch_update_

    launch_update_(flat, moments, by)

"""Triton kernel of dropout and its launcher: see dropout.py."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.dropout_mask import GROUP, DropoutMask

COUNTERS = 256
"""Counters per program."""

# ------------------------------------------------------------------------------------------------- the kernel


@triton.jit(do_not_specialize=["elements", "first_sample", "seed", "offset", "layer", "site"])
def _drop(
    input: tl.tensor,
    output: tl.tensor,
    first_sample: tl.int64,
    seed: tl.int64,
    layer: tl.int64,
    site: tl.int64,
    offset: tl.int64,
    elements: tl.int64,
    width: tl.int64,
    row_stride: tl.int64,
    sample_stride: tl.int64,
    threshold: tl.tensor,
    scale: tl.tensor,
    COUNTERS: tl.constexpr,
) -> None:
    """Drop the elements of COUNTERS counters of one sample per program. Every row starts at a new counter.

    `offset`: the counter of the first element.
    """
    batch = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0).to(tl.int64) * COUNTERS + tl.arange(0, COUNTERS)
    zeros = tl.zeros_like(group)
    a, b, c, d = tl.philox(seed, offset + group, zeros + (first_sample + batch), zeros + layer, zeros + site)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    low, high = tl.join(words & 0xFFFF, words >> 32 & 0xFFFF), tl.join(words >> 16 & 0xFFFF, words >> 48)
    drawn = tl.join(low, high).reshape(COUNTERS, 16).to(tl.int32)
    row = group * 16 // width
    begin = batch * sample_stride + row * row_stride + (group * 16 - row * width)
    place = begin[:, None] + tl.arange(0, 16)[None, :]
    inside = (group * 16 < elements)[:, None]
    x = tl.load(input + place, mask=inside, other=0.0).to(tl.float32)
    found = x * tl.where(drawn < threshold, 0.0, tl.cast(scale, tl.float32))
    tl.store(output + place, found.to(output.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------- launchers


class Dropped(torch.autograd.Function):
    """Dropout that saves nothing: backward draws the same mask again."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dimension: int, mask: DropoutMask) -> Tensor:
        ctx.dimension, ctx.mask = dimension, mask
        return _launch(input, dimension, mask)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return _launch(grad_output, ctx.dimension, ctx.mask), None, None


def _launch(input: Tensor, dimension: int, mask: DropoutMask) -> Tensor:
    """Run the kernel on rows whose width is a multiple of GROUP.

    All arguments are plain numbers, so that no copy to the device is needed, which would synchronize with it.
    """
    input = input.contiguous()
    output = torch.empty_like(input)
    width = input.shape[-1]
    row_stride, sample_stride = input.stride(1 - dimension), input.stride(dimension)
    for (here, run), (batch, samples) in itertools.product(mask.runs(), mask.runs_of_samples()):
        elements = len(run) * width
        if not elements:
            continue
        begin = here.start * row_stride + batch.start * sample_stride
        _drop[(-(-elements // (GROUP * COUNTERS)), len(samples))](
            *(input.view(-1)[begin:], output.view(-1)[begin:], samples.start),
            *(mask.seed, mask.layer, mask.site, run.start * width // GROUP + 1, elements),
            *(width, row_stride, sample_stride, mask.threshold, mask.scale, COUNTERS),
        )
    return output

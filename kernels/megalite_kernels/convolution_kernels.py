"""Triton kernels of the short convolution, forward and backward, and their launchers: see convolution.py.

A program has some tokens of one sample and some channels. It reads a tile again for each tap, from the cache. Tokens
before the segment are those of its halo, with negative numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.chunks import Segment
from megalite_kernels.launch import looping_programs, warps

ROWS, COLUMNS = 16, 128  # of a tile

# ------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def _seen(first: tl.tensor, token: tl.tensor, tokens: tl.tensor, start: tl.tensor, BACK: tl.constexpr) -> tl.tensor:
    """Tell for each token whether its document has a token so many tokens before it."""
    present = (token >= 0) & (token < tokens)
    if first is not None:
        document = tl.load(first + token, mask=present, other=0)
        present = present & (start + token - document >= BACK)
    return present


@triton.jit
def _load(
    input: tl.tensor,
    halo: tl.tensor,
    token: tl.tensor,
    stride: tl.tensor,
    halo_stride: tl.tensor,
    mask: tl.tensor,
    BEFORE: tl.constexpr,
) -> tl.tensor:
    """Load rows of a segment, or of its halo of BEFORE tokens."""
    row = token[:, None].to(tl.int64)
    found = tl.load(input + row * stride, mask=mask & (row >= 0), other=0.0)
    if BEFORE > 0:  # of two pointers, none can be chosen: AMD's compiler fails
        found += tl.load(halo + (row + BEFORE) * halo_stride, mask=mask & (row < 0), other=0.0)
    return found.to(tl.float32)


@triton.jit
def _sum(
    input: tl.tensor,
    halo: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    inside: tl.tensor,
    tokens: tl.tensor,
    start: tl.tensor,
    stride: tl.tensor,
    halo_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """Return the sum of all taps. Pointers to samples, and those to weights [taps, channels], include the channel."""
    total = tl.zeros((token.shape[0], inside.shape[1]), tl.float32)
    for back in tl.static_range(TAPS):
        mask = _seen(first, token, tokens, start, back)[:, None] & inside
        x = _load(input, halo, token - back, stride, halo_stride, mask, TAPS - 1)
        total += x * tl.load(weight + (TAPS - 1 - back) * CHANNELS, mask=inside, other=0.0).to(tl.float32)
        if back == 0 and bias is not None:
            total += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["tokens", "start", "first_stride"])
def convolve(
    input: tl.tensor,
    halo: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    first: tl.tensor,
    output: tl.tensor,
    tokens: tl.tensor,
    start: tl.tensor,
    first_stride: tl.tensor,
    stride: tl.tensor,
    batch_stride: tl.tensor,
    halo_stride: tl.tensor,
    halo_batch_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute a tile of the output [tokens, batch, CHANNELS]. The grid: tiles of tokens, samples, tiles of channels."""
    batch, batches = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = column < CHANNELS
    total = _sum(
        input + batch * batch_stride + column, halo + batch * halo_batch_stride + column, weight + column,
        None if bias is None else bias + column, None if first is None else first + batch * first_stride,
        token, inside, tokens, start, stride, halo_stride, CHANNELS, TAPS,
    )  # fmt: skip
    if SILU:
        total = total / (1 + tl.exp(-total))
    place = output + (token.to(tl.int64) * batches + batch)[:, None] * CHANNELS + column
    tl.store(place, total.to(output.dtype.element_ty), mask=(token < tokens)[:, None] & inside)


@triton.jit(do_not_specialize=["tokens", "start", "first_stride"])
def convolve_backward(
    gradient: tl.tensor,
    input: tl.tensor,
    halo: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    first: tl.tensor,
    input_gradient: tl.tensor,
    halo_gradient: tl.tensor,
    sums: tl.tensor,
    tokens: tl.tensor,
    batches: tl.tensor,
    start: tl.tensor,
    first_stride: tl.tensor,
    gradient_stride: tl.tensor,
    gradient_batch_stride: tl.tensor,
    stride: tl.tensor,
    batch_stride: tl.tensor,
    halo_stride: tl.tensor,
    halo_batch_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute gradients of the input and of the halo, and partial sums of those of the weight and of the bias.

    The sums are [programs, TAPS + 1, CHANNELS], with the bias last. Each program adds up its tiles of tokens in a fixed
    order. The grid's second axis are the tiles of channels.
    """
    program = tl.program_id(0)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = column < CHANNELS
    bias_place = None if bias is None else bias + column
    zeros = (tl.zeros((ROWS, COLUMNS), tl.float32),)
    weight_sum = zeros
    for _ in tl.static_range(TAPS - 1):  # Triton 3.6 cannot multiply tuples
        weight_sum = weight_sum + zeros  # type: ignore[assignment]
    bias_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for index in range(program, tl.cdiv(tokens + TAPS - 1, ROWS) * batches, tl.num_programs(0)):
        batch = (index % batches).to(tl.int64)
        token = index // batches * ROWS - (TAPS - 1) + tl.arange(0, ROWS)
        of_sample, of_halo = input + batch * batch_stride + column, halo + batch * halo_batch_stride + column
        documents = None if first is None else first + batch * first_stride
        arriving = gradient + batch * gradient_batch_stride + column
        result = tl.zeros((ROWS, COLUMNS), tl.float32)
        here = (token < tokens)[:, None] & inside
        x = _load(of_sample, of_halo, token, stride, halo_stride, here, TAPS - 1)
        for back in tl.static_range(TAPS):
            later = token + back
            seen = _seen(documents, later, tokens, start, back)[:, None] & inside
            own = tl.load(arriving + later[:, None].to(tl.int64) * gradient_stride, mask=seen, other=0.0)
            own = own.to(tl.float32)
            if SILU:
                total = _sum(
                    of_sample, of_halo, weight + column, bias_place, documents,
                    later, inside, tokens, start, stride, halo_stride, CHANNELS, TAPS,
                )  # fmt: skip
                share = 1 / (1 + tl.exp(-total))
                own *= share * (1 + total * (1 - share))
            if back == 0:
                bias_sum += own
            factor = tl.load(weight + (TAPS - 1 - back) * CHANNELS + column, mask=inside, other=0.0)
            result += own * factor.to(tl.float32)
            weight_part = (weight_sum[0] + own * x,)
            weight_sum = weight_sum[1:] + weight_part  # rotate to the next tap
        row = token[:, None].to(tl.int64)
        result = result.to(input_gradient.dtype.element_ty)
        tl.store(input_gradient + (row * batches + batch) * CHANNELS + column, result, mask=here & (row >= 0))
        if TAPS > 1:
            before = halo_gradient + ((row + TAPS - 1) * batches + batch) * CHANNELS + column
            tl.store(before, result, mask=here & (row < 0))
    place = sums + program.to(tl.int64) * (TAPS + 1) * CHANNELS + column
    for back in tl.static_range(TAPS):
        tl.store(place + (TAPS - 1 - back) * CHANNELS, tl.sum(weight_sum[back], 0)[None, :], mask=inside)
    if bias is not None:
        tl.store(place + TAPS * CHANNELS, tl.sum(bias_sum, 0)[None, :], mask=inside)


# ------------------------------------------------------------------------------------------------- launchers


def launch_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Sequence[Segment],
    halos: Sequence[Tensor],
    silu: bool,
) -> Tensor:
    """Return the outputs of all segments."""
    (_, batch, channels), taps = input.shape, weight.shape[1]
    input, by_tap = _with_columns(input), weight.t().contiguous()
    output = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    lengths = [len(tokens) for tokens, _ in segments]
    parts = zip(segments, map(_with_columns, halos), input.split(lengths), output.split(lengths), strict=True)
    for segment, halo, own, target in parts:
        if target.numel():
            convolve[(-(-len(own) // ROWS), batch, -(-channels // COLUMNS))](
                *(own, halo, by_tap, None if bias is None else bias.contiguous(), segment.first, target),
                *(len(own), segment.tokens.start, _stride_of(segment), *own.stride()[:2], *halo.stride()[:2]),
                *(channels, taps, silu, ROWS, COLUMNS),
                num_warps=warps(ROWS * COLUMNS),
            )
    return output


def launch_convolution_backward(
    gradient: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Sequence[Segment],
    halos: Sequence[Tensor],
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Return the gradients of the input, the weight, the bias and the halos."""
    (_, batch, channels), taps = input.shape, weight.shape[1]
    input, gradient, by_tap = _with_columns(input), _with_columns(gradient), weight.t().contiguous()
    of_input = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    of_halos = [torch.zeros(halo.shape, dtype=input.dtype, device=input.device) for halo in halos]
    total = torch.zeros(taps + 1, channels, dtype=torch.float32, device=input.device)
    lengths, tiles = [len(tokens) for tokens, _ in segments], -(-channels // COLUMNS)
    parts = [each.split(lengths) for each in (gradient, input, of_input)]
    for segment, halo, of_halo, arriving, own, target in zip(
        segments, map(_with_columns, halos), of_halos, *parts, strict=True
    ):
        if target.numel():
            of_tokens = -(-(len(own) + taps - 1) // ROWS) * batch
            programs = looping_programs(of_tokens, tiles * warps(ROWS * COLUMNS), input.device)
            sums = torch.empty(programs, taps + 1, channels, dtype=torch.float32, device=input.device)
            convolve_backward[(programs, tiles)](
                *(arriving, own, halo, by_tap, None if bias is None else bias.contiguous(), segment.first),
                *(target, of_halo, sums, len(own), batch, segment.tokens.start, _stride_of(segment)),
                *(*arriving.stride()[:2], *own.stride()[:2], *halo.stride()[:2]),
                *(channels, taps, silu, ROWS, COLUMNS),
                num_warps=warps(ROWS * COLUMNS),
            )
            total += sums.sum(dim=0)
    of_bias = None if bias is None else total[taps].to(bias.dtype)
    return of_input, total[:taps].t().to(weight.dtype), of_bias, of_halos


def _with_columns(tensor: Tensor) -> Tensor:
    """Return a tensor whose channels are contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _stride_of(segment: Segment) -> int:
    """Return the stride of samples in the table of documents."""
    return 0 if segment.first is None else segment.first.stride(0)

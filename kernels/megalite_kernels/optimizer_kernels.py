"""Triton kernels of the updates and of sums of squares, and their launchers: see optimizer.py, exact_sum.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.formats import FORMATS
from megalite_kernels.launch import tile, unit
from megalite_kernels.master_weights import bits_of
from megalite_kernels.moments import BLOCK, Quantized
from megalite_kernels.quantization_kernels import dequantized, quantized
from megalite_kernels.updates import SGD, AdamW, Flat, Moment

NORM_BLOCKS = 64  # blocks of `l2_norm` per program

# ------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def load_master(master: tl.tensor, parameters: tl.tensor, place: tl.tensor, present: tl.tensor) -> tl.tensor:
    """Load master weights as fp32. A master of 16-bit integers holds remainders."""
    if master.dtype.element_ty == tl.int16:
        bits = tl.load(parameters + place, mask=present, other=0).to(tl.int32) << 16
        bits += tl.load(master + place, mask=present, other=0)
        return bits.to(tl.float32, bitcast=True)
    else:  # noqa: RET505  (only one branch is compiled)
        return tl.load(master + place, mask=present, other=0.0).to(tl.float32)


@triton.jit
def store_master(
    value: tl.tensor, master: tl.tensor, parameters: tl.tensor, place: tl.tensor, present: tl.tensor
) -> None:
    """Store master weights, and the parameters if they are not their own masters."""
    if parameters is not None and parameters.dtype.element_ty == tl.int16:
        bits = tl.where(value == value, value.to(tl.int32, bitcast=True), 0x7FC00000)
        upper = (bits + (1 << 15)) >> 16
        tl.store(parameters + place, upper.to(tl.int16), mask=present)
        if master.dtype.element_ty == tl.int16:
            tl.store(master + place, (bits - (upper << 16)).to(tl.int16), mask=present)
    elif parameters is not None:
        tl.store(parameters + place, value.to(parameters.dtype.element_ty), mask=present)
    if master.dtype.element_ty != tl.int16:
        tl.store(master + place, value.to(master.dtype.element_ty), mask=present)


@triton.jit
def load_moment(
    moment: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    place: tl.tensor,
    present: tl.tensor,
    ROOT: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tl.tensor:
    """Load a tile in fp32, [rows, BLOCK]. FORMAT is None if the moment is not quantized."""
    if FORMAT is None:
        return tl.load(moment + place, mask=present, other=0.0).to(tl.float32)
    else:  # noqa: RET505  (only one branch is compiled)
        codes = tl.load(moment + place, mask=present, other=0)
        scale = tl.load(scales + row, mask=tl.max(present.to(tl.int32), 1) > 0, other=0.0)
        value = dequantized(codes, scale, FORMAT[0], FORMAT[1])
        return value * value if ROOT else value


@triton.jit
def store_moment(
    value: tl.tensor,
    moment: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    place: tl.tensor,
    present: tl.tensor,
    seed: tl.tensor,
    offset: tl.tensor,
    ROOT: tl.constexpr,
    FORMAT: tl.constexpr,
) -> None:
    """Store a tile [rows, BLOCK], quantized unless FORMAT is None. ROOT: the codes are of its square root, and those
    of elements above zero stay above zero, unless their scale underflows."""
    if FORMAT is None:
        tl.store(moment + place, value.to(moment.dtype.element_ty), mask=present)
    else:
        wide = tl.sqrt_rn(value) if ROOT else value
        wide = tl.where(present, wide, 0.0)
        codes, scale = quantized(wide, seed, offset + row * value.shape[1], FORMAT[0], FORMAT[1], FORMAT[2], True)
        if ROOT:
            scale = tl.where(scale < 2.0 ** (FORMAT[0] - FORMAT[1] - 63), 0.0, scale)
            there = (scale > 0.0)[:, None]
            codes = tl.where((scale == 0.0)[:, None], 0, tl.where((codes == 0) & (wide > 0.0) & there, 1, codes))
        tl.store(moment + place, codes.to(moment.dtype.element_ty), mask=present)
        tl.store(scales + row, scale, mask=tl.max(present.to(tl.int32), 1) > 0)


@triton.jit
def _tile(
    units: tl.tensor, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the program's rows, the offsets of their elements, and a mask of the elements inside the buffer.

    The mask is equal for all elements of a unit, which lets the compiler use wide accesses.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    present = (row * (BLOCK // UNIT))[:, None] + (column // UNIT)[None, :] < units
    return row, row[:, None] * BLOCK + column[None, :], present


@triton.jit(do_not_specialize=["units", "seed", "offset"])
def _adamw(
    parameters: tl.tensor,
    master: tl.tensor,
    gradients: tl.tensor,
    average: tl.tensor,
    average_scales: tl.tensor,
    squares: tl.tensor,
    squares_scales: tl.tensor,
    units: tl.tensor,
    seed: tl.int64,
    offset: tl.int64,
    factor: tl.tensor,
    shrinking: tl.tensor,
    rate: tl.tensor,
    correction: tl.tensor,
    beta2: tl.tensor,
    new1: tl.tensor,
    new2: tl.tensor,
    epsilon: tl.tensor,
    AVERAGE: tl.constexpr,
    SQUARES: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update one tile per program.

    Args:
        shrinking: 1 - learning rate * weight decay.
        rate: learning rate / (1 - beta1^step).
        correction: sqrt(1 - beta2^step).
        new1: 1 - beta1.
        new2: 1 - beta2.
    """
    row, place, present = _tile(units, UNIT, ROWS, BLOCK)
    g = tl.load(gradients + place, mask=present, other=0.0).to(tl.float32) * tl.cast(factor, tl.float32)
    m = load_moment(average, average_scales, row, place, present, False, AVERAGE)
    v = load_moment(squares, squares_scales, row, place, present, True, SQUARES)
    w = load_master(master, parameters, place, present)
    m += (g - m) * tl.cast(new1, tl.float32)
    v = v * tl.cast(beta2, tl.float32) + g * g * tl.cast(new2, tl.float32)
    root = tl.sqrt_rn(v) / tl.cast(correction, tl.float32) + tl.cast(epsilon, tl.float32)
    w = w * tl.cast(shrinking, tl.float32) - tl.cast(rate, tl.float32) * (m / root)
    store_moment(m, average, average_scales, row, place, present, seed, offset, False, AVERAGE)
    store_moment(v, squares, squares_scales, row, place, present, seed + 1, offset, True, SQUARES)
    store_master(w, master, parameters, place, present)


@triton.jit(do_not_specialize=["units", "seed", "offset"])
def _sgd(
    parameters: tl.tensor,
    master: tl.tensor,
    gradients: tl.tensor,
    average: tl.tensor,
    average_scales: tl.tensor,
    units: tl.tensor,
    seed: tl.int64,
    offset: tl.int64,
    factor: tl.tensor,
    rate: tl.tensor,
    decay: tl.tensor,
    momentum: tl.tensor,
    AVERAGE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update one tile per program, with momentum if there is an average. The decay is added to the gradient."""
    row, place, present = _tile(units, UNIT, ROWS, BLOCK)
    g = tl.load(gradients + place, mask=present, other=0.0).to(tl.float32) * tl.cast(factor, tl.float32)
    w = load_master(master, parameters, place, present)
    g += w * tl.cast(decay, tl.float32)
    if average is not None:
        m = load_moment(average, average_scales, row, place, present, False, AVERAGE)
        g += m * tl.cast(momentum, tl.float32)
        store_moment(g, average, average_scales, row, place, present, seed, offset, False, AVERAGE)
    store_master(w - g * tl.cast(rate, tl.float32), master, parameters, place, present)


@triton.jit(do_not_specialize=["units"])
def _sum_squares(
    values: tl.tensor,
    sums: tl.tensor,
    scales: tl.tensor,
    units: tl.tensor,
    UNIT: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the sums of squares of BLOCKS scaled blocks per program, and the scale of each block."""
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    block = tl.arange(0, BLOCKS)
    element = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    start = first * BLOCK
    present = start // UNIT + element // UNIT < units
    x = tl.load(values + start + element, mask=present, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)  # max ignores NaN, but the sum below does not
    scale = tl.where(largest > 2.0**40, 2.0**-90, tl.where(largest < 2.0**-40, 2.0**90, 1.0))
    scaled = x * scale[:, None]
    written = start // UNIT + block * BLOCK // UNIT < units
    tl.store(sums + first + block, tl.sum(scaled * scaled, 1), mask=written)
    tl.store(scales + first + block, scale, mask=written)


# ------------------------------------------------------------------------------------------------- launchers


def launch_update_(flat: Flat, moments: Sequence[Moment], by: AdamW | SGD) -> None:
    """Launch one program per tile. Parameters that are their own masters are passed as masters."""
    kept: list[Tensor | None] = []
    for moment in moments:
        kept += [moment.bytes, moment.scales] if isinstance(moment, Quantized) else [moment, None]
    formats = [FORMATS[moment.codes.dtype] if isinstance(moment, Quantized) else None for moment in moments]
    function: Any = _adamw
    numbers: tuple[float, ...]
    if isinstance(by, AdamW):
        rate, correction = by.rate / (1.0 - by.beta1**by.step), math.sqrt(1.0 - by.beta2**by.step)
        numbers = (1.0 - by.rate * by.decay, rate, correction, by.beta2, 1.0 - by.beta1, 1.0 - by.beta2, by.epsilon)
    else:
        function, numbers = _sgd, (by.rate, by.decay, by.momentum)
        kept, formats = kept or [None, None], formats or [None]
    weights = (None, flat.parameters) if flat.master is None else (bits_of(flat.parameters, flat.master), flat.master)
    elements, shape = len(flat.parameters), tile(BLOCK, largest=BLOCK)
    each = unit(elements)
    if elements:
        function[(-(-elements // (shape.rows * BLOCK)),)](
            *(*weights, flat.gradients, *kept, elements // each, by.seed, flat.first, by.factor, *numbers),
            *(*formats, each, shape.rows, BLOCK),
            num_warps=shape.warps,
        )


def launch_sums_of_squares(values: Tensor, block: int) -> Tensor:
    elements, each = values.numel(), unit(values.numel())
    blocks = -(-elements // block)
    sums, scales = (torch.empty(blocks, dtype=torch.float32, device=values.device) for _ in range(2))
    if elements:
        size = NORM_BLOCKS * block
        programs, warps = -(-blocks // NORM_BLOCKS), tile(size, largest=size).warps
        _sum_squares[(programs,)](values, sums, scales, elements // each, each, NORM_BLOCKS, block, num_warps=warps)
    return sums / scales.double().square_()

"""The Triton kernels of the updates, and what launches them: see optimizer.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import tile, unit
from megalite_kernels.master_weights import bits_of
from megalite_kernels.master_weights_kernels import load_master, store_master
from megalite_kernels.moments import BLOCK, Quantized
from megalite_kernels.moments_kernels import load_moment, store_moment
from megalite_kernels.optimizer import SGD, AdamW, Flat, Moment
from megalite_kernels.quantization import FORMATS

# ------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def _tile(
    units: tl.tensor, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The program's rows, where their elements lie, and which are there: units that are so together or not at all."""
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
    """`shrinking`: what decay leaves of a weight; `rate`, over the first moment's correction; `correction`: the root of
    the second's; `new1`, `new2`: one minus each beta."""
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
    row, place, present = _tile(units, UNIT, ROWS, BLOCK)
    g = tl.load(gradients + place, mask=present, other=0.0).to(tl.float32) * tl.cast(factor, tl.float32)
    w = load_master(master, parameters, place, present)
    g += w * tl.cast(decay, tl.float32)
    if average is not None:
        m = load_moment(average, average_scales, row, place, present, False, AVERAGE)
        g += m * tl.cast(momentum, tl.float32)
        store_moment(g, average, average_scales, row, place, present, seed, offset, False, AVERAGE)
    store_master(w - g * tl.cast(rate, tl.float32), master, parameters, place, present)


# ------------------------------------------------------------------------------------------------- what launches them


def launch_adamw_(flat: Flat, average: Moment, squares: Moment, by: AdamW) -> None:
    rate, correction = by.rate / (1.0 - by.beta1**by.step), math.sqrt(1.0 - by.beta2**by.step)
    numbers = (1.0 - by.rate * by.decay, rate, correction, by.beta2, 1.0 - by.beta1, 1.0 - by.beta2, by.epsilon)
    _launch(_adamw, flat, (average, squares), by.seed, (by.factor, *numbers))


def launch_sgd_(flat: Flat, average: Moment | None, by: SGD) -> None:
    _launch(_sgd, flat, (average,), by.seed, (by.factor, by.rate, by.decay, by.momentum))


def _launch(function: Any, flat: Flat, moments: Sequence[Moment | None], seed: int, numbers: Sequence[float]) -> None:
    """One program a tile; the parameters are an argument where they are not their own masters."""
    elements, shape = len(flat.parameters), tile(BLOCK, largest=BLOCK)
    weights = (None, flat.parameters) if flat.master is None else (bits_of(flat.parameters, flat.master), flat.master)
    kept: list[Tensor | None] = []
    for moment in moments:
        kept += [moment.bytes, moment.scales] if isinstance(moment, Quantized) else [moment, None]
    formats = [FORMATS[moment.codes.dtype] if isinstance(moment, Quantized) else None for moment in moments]
    each = unit(elements)
    if elements:
        function[(-(-elements // (shape.rows * BLOCK)),)](
            *(*weights, flat.gradients, *kept, elements // each, seed, flat.first, *numbers),
            *(*formats, each, shape.rows, BLOCK),
            num_warps=shape.warps,
        )

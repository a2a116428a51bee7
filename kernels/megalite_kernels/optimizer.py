"""AdamW and SGD with momentum over flat buffers, in place: one launch reads all once and writes all once.

AdamW (arXiv:1711.05101), with the gradient g times a factor that clips it and takes the loss scale out, moments m and
v, rate r, decay d and the number of the step t:

    m = m + (1 - beta1) (g - m)      v = beta2 v + (1 - beta2) g^2
    w = (1 - r d) w - r / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)

SGD: m = momentum m + (g + d w), w = w - r m; without momentum m is g + d w. Arithmetic is in fp32 or wider, and what is
kept is rounded; constants are computed in double precision. The parameters are their own masters, or rounded from
masters of another dtype, or bf16 beside int16 remainders of fp32 masters (`master_weights`). Moments are of any dtype,
or in 8 bits (`moments`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megalite_kernels import launch
from megalite_kernels.implementation import kernel, runs_triton
from megalite_kernels.launch import tile, unit
from megalite_kernels.master_weights import bits_of, keep_weights_, load_master, store_master, wide_weights
from megalite_kernels.moments import BLOCK, Quantized, load_moment, store_moment
from megalite_kernels.quantization import FORMATS

if TYPE_CHECKING:
    import triton.language as tl

Moment = Tensor | Quantized


class Flat(NamedTuple):
    """What is updated: [elements] each."""

    parameters: Tensor
    gradients: Tensor
    """They stay as they are."""
    master: Tensor | None = None
    """None: the parameters are their own. int16: remainders."""
    first: int = 0
    """The number of the first element among those that draw by one seed; a multiple of 8."""

    def part(self, start: int, stop: int) -> Flat:
        master = None if self.master is None else self.master[start:stop]
        return Flat(self.parameters[start:stop], self.gradients[start:stop], master, self.first + start)


class AdamW(NamedTuple):
    """The numbers of an update."""

    rate: float
    decay: float
    beta1: float
    beta2: float
    epsilon: float
    step: int
    """Counts updates from 1."""
    factor: float = 1.0
    """What the gradients are multiplied by."""
    seed: int = 0
    """An even number of 63 bits, by which moments are rounded to 8 bits: of each update another."""


class SGD(NamedTuple):
    """The numbers of an update."""

    rate: float
    decay: float
    momentum: float
    factor: float = 1.0
    """What the gradients are multiplied by."""
    seed: int = 0
    """An even number of 63 bits, by which moments are rounded to 8 bits: of each update another."""


# ------------------------------------------------------------------------------------------------- the reference


def adamw_reference_(flat: Flat, average: Moment, squares: Moment, by: AdamW) -> None:
    for gradient, weight, (mean, square) in _chunks(flat, (average, squares), by):
        mean.lerp_(gradient, 1.0 - by.beta1)
        square.mul_(by.beta2).addcmul_(gradient, gradient, value=1.0 - by.beta2)
        root = square.sqrt().div_(math.sqrt(1.0 - by.beta2**by.step)).add_(by.epsilon)
        weight.mul_(1.0 - by.rate * by.decay).addcdiv_(mean, root, value=-by.rate / (1.0 - by.beta1**by.step))


def sgd_reference_(flat: Flat, average: Moment | None, by: SGD) -> None:
    for gradient, weight, means in _chunks(flat, () if average is None else (average,), by):
        change = gradient.add(weight, alpha=by.decay)
        for mean in means:  # one, or none
            change = mean.mul_(by.momentum).add_(change)
        weight.add_(change, alpha=-by.rate)


def _chunks(flat: Flat, moments: tuple[Moment, ...], by: AdamW | SGD) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
    """Gradients, and weights and moments to change in place, in fp32 or wider, so few that they stay in the cache."""
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
                moment[start : start + size].copy_(value)  # nothing to do where it is the same memory


def _read(moment: Moment, start: int, stop: int) -> Tensor:
    return moment.read(start, stop) if isinstance(moment, Quantized) else moment[start:stop]


# ------------------------------------------------------------------------------------------------- the kernels


@kernel
def _tile(
    units: tl.tensor, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The program's rows, where their elements lie, and which are there: units that are so together or not at all."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    present = (row * (BLOCK // UNIT))[:, None] + (column // UNIT)[None, :] < units
    return row, row[:, None] * BLOCK + column[None, :], present


@kernel
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


@kernel
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


# ------------------------------------------------------------------------------------------------- what is called


@torch.no_grad()
def adamw_(flat: Flat, average: Moment, squares: Moment, by: AdamW) -> None:
    """Update weights and moments, each [elements], in place.

    Raises:
        ValueError: the elements of a tensor do not lie side by side, or they are of several lengths.
    """
    if not _runs_triton(flat, average, squares):
        adamw_reference_(flat, average, squares, by)
        return
    rate, correction = by.rate / (1.0 - by.beta1**by.step), math.sqrt(1.0 - by.beta2**by.step)
    numbers = (1.0 - by.rate * by.decay, rate, correction, by.beta2, 1.0 - by.beta1, 1.0 - by.beta2, by.epsilon)
    _launch(_adamw, flat, (average, squares), by.seed, (by.factor, *numbers))


@torch.no_grad()
def sgd_(flat: Flat, average: Moment | None, by: SGD) -> None:
    """Update weights and momentum (None: there is none), each [elements], in place.

    Raises:
        ValueError: the elements of a tensor do not lie side by side, or they are of several lengths.
    """
    if not _runs_triton(flat, average):
        sgd_reference_(flat, average, by)
        return
    _launch(_sgd, flat, (average,), by.seed, (by.factor, by.rate, by.decay, by.momentum))


def _runs_triton(flat: Flat, *moments: Moment | None) -> bool:
    values = [moment.codes if isinstance(moment, Quantized) else moment for moment in moments]
    tensors = [tensor for tensor in (*flat[:3], *values) if tensor is not None]
    for tensor in tensors:
        if tensor.dim() != 1 or not tensor.is_contiguous() or len(tensor) != len(flat.parameters):
            raise ValueError("an update is of flat tensors of one length, their elements side by side")
    return runs_triton("optimizer", *tensors)


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

"""Triton kernels of the cross entropy and their launchers: see cross_entropy.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import Tile, as_rows, tile
from megalite_kernels.loss_options import Columns, LossOptions

STATISTICS_COLUMNS = 2048  # per iteration, while the load of the next ones is in flight
GRADIENT_COLUMNS = 4096  # per program
ACCESS_BYTES = 16  # per load of a thread, from adjacent columns

# ------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def _exp(x: tl.tensor) -> tl.tensor:
    """Return exp(x). tl.exp takes twice as many instructions, because it is also exact below 1e-38."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Return tanh with an absolute error of about 1e-7."""
    return 2.0 / (1.0 + _exp(-2.0 * x)) - 1.0


@triton.jit(do_not_specialize=["rows"])
def _statistics(
    logits: tl.tensor,
    labels: tl.tensor,
    found: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    cap: tl.tensor,
    WIDTH: tl.constexpr,
    VALID: tl.constexpr,
    SMOOTHED: tl.constexpr,
    CAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute the statistics of one row per program.

    Each GROUP of adjacent columns, which one thread loads at once, has its own maximum and sum. Threads therefore
    synchronize only at the end. The next tile is loaded while the current one is summed.
    """
    row = tl.program_id(0).to(tl.int64)
    place = logits + row * stride
    local = tl.load(labels + row) - first
    owned = (local >= 0) & (local < VALID)
    label_logit = tl.load(place + tl.where(owned, local, 0)).to(tl.float32)
    column = tl.arange(0, COLUMNS // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    largest = tl.full((COLUMNS // GROUP,), -1e38, tl.float32)  # finite: inf - inf would be NaN
    exponentials = tl.zeros((COLUMNS // GROUP,), tl.float32)
    total = tl.zeros((COLUMNS // GROUP,), tl.float32)
    coming = tl.load(place + column, mask=column < WIDTH, other=0.0)
    for start in tl.range(0, VALID, COLUMNS, loop_unroll_factor=2):
        x = coming.to(tl.float32)
        following = start + COLUMNS + column
        coming = tl.load(place + following, mask=following < WIDTH, other=0.0)
        if CAPPED:
            x = tl.cast(cap, tl.float32) * _tanh(x / tl.cast(cap, tl.float32))
        if SMOOTHED:
            total += tl.sum(tl.where(start + column < VALID, x, 0.0), 1)
        if VALID % COLUMNS != 0:
            x = tl.where(start + column < VALID, x, -float("inf"))
        larger = tl.maximum(largest, tl.max(x, 1))
        exponentials = exponentials * _exp(largest - larger) + tl.sum(_exp(x - larger[:, None]), 1)
        largest = larger
    highest = tl.max(largest, 0)
    tl.store(found + row, highest + tl.log(tl.sum(exponentials * _exp(largest - highest), 0)))
    if CAPPED:
        label_logit = tl.cast(cap, tl.float32) * _tanh(label_logit / tl.cast(cap, tl.float32))
    tl.store(found + tl.cast(rows, tl.int64) + row, tl.where(owned, label_logit, 0.0))
    if SMOOTHED:
        tl.store(found + tl.cast(rows, tl.int64) * 2 + row, tl.sum(total, 0))


@triton.jit
def _gradient(
    logits: tl.tensor,
    labels: tl.tensor,
    log_sums: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    on_label: tl.tensor,
    on_all: tl.tensor,
    z_loss: tl.tensor,
    cap: tl.tensor,
    WIDTH: tl.constexpr,
    VALID: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    CAPPED: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Overwrite COLUMNS columns of a row with their gradient, per program.

    `on_label`: the part of the target at the label; `on_all`: its part at every entry.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = logits + row * stride + column
    x = tl.load(place, mask=column < WIDTH, other=0.0).to(tl.float32)
    label = (tl.load(labels + row) - first).to(tl.int32)
    log_sum = tl.load(log_sums + row).to(tl.float32)
    scale = tl.load(scales + row).to(tl.float32)
    if CAPPED:
        bent = _tanh(x / tl.cast(cap, tl.float32))
        x = tl.cast(cap, tl.float32) * bent
    gradient = _exp(x - log_sum)
    if Z_LOSS:
        gradient *= 1.0 + 2.0 * tl.cast(z_loss, tl.float32) * log_sum
    gradient -= tl.where(column == label, tl.cast(on_label, tl.float32), 0.0)
    if SMOOTHED:
        gradient -= tl.cast(on_all, tl.float32)
    gradient *= scale
    if CAPPED:
        gradient *= 1.0 - bent * bent
    if VALID < WIDTH:
        gradient = tl.where(column < VALID, gradient, 0.0)
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=column < WIDTH)


# ------------------------------------------------------------------------------------------------- launchers


def launch_statistics(logits: Tensor, labels: Tensor, columns: Columns, options: LossOptions) -> Tensor:
    """Return the statistics, fp32 [2 or 3, tokens]; the third row is there with label smoothing."""
    flat, (rows, width) = as_rows(logits), logits.shape
    smoothed = options.label_smoothing != 0.0
    found = torch.empty((2 + smoothed, rows), dtype=torch.float32, device=logits.device)
    if rows:
        shape, group = _tile(width, STATISTICS_COLUMNS), ACCESS_BYTES // logits.element_size()
        _statistics[(rows,)](
            *(flat, labels.contiguous(), found, rows, flat.stride(0), columns.first, options.soft_cap or 1.0),
            *(width, columns.valid, smoothed, options.soft_cap is not None, group, max(shape.columns, group)),
            num_warps=shape.warps,
        )
    return found


def launch_gradient_(
    logits: Tensor, labels: Tensor, log_sums: Tensor, scales: Tensor, columns: Columns, options: LossOptions
) -> None:
    """Overwrite the logits [tokens, columns] with their gradient. `log_sums` and `scales`: [tokens]."""
    rows, width = logits.shape
    if rows:
        shape, smoothing = _tile(width, GRADIENT_COLUMNS), options.label_smoothing
        _gradient[(rows, -(-width // shape.columns))](
            *(logits, labels.contiguous(), log_sums.contiguous(), scales.contiguous(), logits.stride(0), columns.first),
            *(1.0 - smoothing, smoothing / columns.vocab_size, options.z_loss, options.soft_cap or 1.0),
            *(width, columns.valid, smoothing != 0.0, options.z_loss != 0.0),
            *(options.soft_cap is not None, shape.columns),
            num_warps=shape.warps,
        )


def _tile(width: int, largest: int) -> Tile:
    """Choose a tile of at most `largest` columns. Columns are read only once, so tiles of wide rows are not halved."""
    return tile(min(width, largest), largest=largest)

"""Parts of the kernels of recurrences: see recurrence_kernels.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def factors(
    decay: tl.tensor,
    first: tl.tensor,
    chunk: tl.tensor,
    batch: tl.tensor,
    head: tl.tensor,
    batches: tl.tensor,
    tokens: tl.tensor,
    begin: tl.tensor,
    start: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return L, [SIZE, SIZE], and the factors `inflow`, `outflow` and `keep` of a chunk.

    `first` has the first token of each token's document, [batch, tokens]. `begin` is the index in the sample of the
    first chunk's first token, and `start` that of the segment's.
    """
    index = tl.arange(0, SIZE)
    row = (chunk * SIZE + index).to(tl.int64) * batches + batch
    total = tl.cumsum(tl.load(decay + row * HEADS + head), 0)
    last = tl.sum(tl.where(index == SIZE - 1, total, 0.0), 0)
    below = index[:, None] >= index[None, :]
    pairs = tl.where(below, tl.exp(tl.where(below, total[:, None] - total[None, :], 0.0)), 0.0)
    inflow, outflow, keep = tl.exp(total), tl.exp(last - total), tl.exp(last)
    if first is not None:
        document = tl.load(first + batch.to(tl.int64) * tokens + chunk * SIZE + index).to(tl.int32)
        of_last = tl.sum(tl.where(index == SIZE - 1, document, 0), 0)
        here = tl.maximum(start, begin + chunk * SIZE)
        pairs = tl.where(document[:, None] == document[None, :], pairs, 0.0)
        inflow = tl.where(document >= here, 0.0, inflow)
        outflow = tl.where(document == of_last, outflow, 0.0)
        keep = tl.where(of_last >= here, 0.0, keep)
    return pairs, inflow, outflow, keep


@triton.jit
def inverse_of(system: tl.tensor, SIZE: tl.constexpr, LEVELS: tl.constexpr) -> tl.tensor:
    """Return (1 + system)^-1 of a system below the diagonal.

    In parts of 16 rows, each column is subtracted in turn. Then that of two parts is joined: what is below the diagonal
    is -(that of the second) system (that of the first). Both are as stable as a substitution, unlike powers.
    """
    index = tl.arange(0, SIZE)
    row, column = index[:, None], index[None, :]
    result = tl.where(row == column, 1.0, 0.0)
    within = tl.where((row >> 4) == (column >> 4), system, 0.0)
    for at in range(15):
        of_column = tl.sum(tl.where((column & 15) == at, within, 0.0), 1)
        own = tl.sum(tl.where((row & 15) == at, result, 0.0), 0)
        result -= tl.where((row >> 4) == (column >> 4), of_column[:, None] * own[None, :], 0.0)
    for level in tl.static_range(4, LEVELS):
        corner = ((row >> level) == (column >> level) + 1) & (((row >> level) & 1) == 1)
        part = tl.dot(result, tl.where(corner, system, 0.0), input_precision="tf32")
        result -= tl.dot(part, result, input_precision="tf32")
    return result


@triton.jit
def from_the_end(values: tl.tensor) -> tl.tensor:
    """Return the sum of each value and all after it."""
    return tl.cumsum(values, 0, reverse=True)


@triton.jit
def load_tile(
    rows: tl.tensor,
    row: tl.tensor,
    stride: tl.tensor,
    head: tl.tensor,
    at: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Load COLUMNS columns of a head from `at` on, of these rows."""
    column = at + tl.arange(0, COLUMNS)[None, :]
    place = rows + row[:, None] * stride + head * WIDTH + column
    return tl.load(place, mask=column < WIDTH, other=0.0)


@triton.jit
def store_tile(
    rows: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    at: tl.tensor,
    values: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Store what `load_tile` would load from contiguous rows of all heads."""
    column = at + tl.arange(0, COLUMNS)[None, :]
    place = rows + row[:, None] * (HEADS * WIDTH) + head * WIDTH + column
    tl.store(place, values.to(rows.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def places_of_state(
    number: tl.tensor,
    key_at: tl.tensor,
    at: tl.tensor,
    KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the places of a part of a state among all, and which of them are inside."""
    key, column = key_at + tl.arange(0, KEY_COLUMNS)[:, None], at + tl.arange(0, COLUMNS)[None, :]
    place = number.to(tl.int64) * KEY_WIDTH * WIDTH + key * WIDTH + column
    return place, (key < KEY_WIDTH) & (column < WIDTH)

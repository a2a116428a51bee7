"""Triton kernels of recurrences with one decay a head: see recurrence.py and recurrence_block.py, whose words they use.

Forward: `prepare_chunks` solves the system of each chunk of the delta rule, `run_states` goes from chunk to chunk, and
`compute_outputs` computes the outputs of each. Backward prepares again; `go_back` goes from chunk to chunk in reverse,
and `compute_gradients` computes the gradients of each chunk. All sums are in fp32. Factors of products are rounded to
tf32 where they are not in half precision, as inputs are; those that solve a system are not.

Tensors of tokens are rows, [tokens * batch, heads * width], and those of chunks [chunks, batch * heads, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels import launch
from megalite_kernels.launch import as_rows
from megalite_kernels.recurrence_segment import WIDEST, Part

FEWEST = 16  # of each size of a tile: what tensor cores multiply
COLUMNS, STATE_COLUMNS = 64, 32


class _Sizes(NamedTuple):
    HEADS: int
    SHARED: int
    KEY_WIDTH: int
    WIDTH: int
    SIZE: int


# ------------------------------------------------------------------------------------------------- parts of kernels


@triton.jit
def _factors(
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
def _inverse(system: tl.tensor, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """Return (1 + system)^-1 of a system below the diagonal.

    In parts of 16 rows, each column is subtracted in turn. Then that of two parts is joined: what is below the diagonal
    is -(that of the second) system (that of the first). Both are as stable as a substitution, unlike powers.
    """
    index = tl.arange(0, SIZE)
    row, column = index[:, None], index[None, :]
    result = tl.where(row == column, 1.0, 0.0)
    within = tl.where((row >> 4) == (column >> 4), system, 0.0)
    for at in range(0, 15):
        of_column = tl.sum(tl.where((column & 15) == at, within, 0.0), 1)
        own = tl.sum(tl.where((row & 15) == at, result, 0.0), 0)
        result -= tl.where((row >> 4) == (column >> 4), of_column[:, None] * own[None, :], 0.0)
    for level in tl.static_range(4, LEVELS):
        corner = ((row >> level) == (column >> level) + 1) & (((row >> level) & 1) == 1)
        part = tl.dot(result, tl.where(corner, system, 0.0), input_precision=PRECISION)
        result -= tl.dot(part, result, input_precision=PRECISION)
    return result


@triton.jit
def _from_the_end(values: tl.tensor) -> tl.tensor:
    """Return the sum of each value and all after it."""
    return tl.cumsum(values, 0, reverse=True)


@triton.jit
def _tile(
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
def _store_tile(
    rows: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    at: tl.tensor,
    values: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Store what `_tile` would load from contiguous rows of all heads."""
    column = at + tl.arange(0, COLUMNS)[None, :]
    place = rows + row[:, None] * (HEADS * WIDTH) + head * WIDTH + column
    tl.store(place, values.to(rows.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _matrix(
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


# ------------------------------------------------------------------------------------------------- the kernels


@triton.jit(do_not_specialize=["tokens", "begin", "start"])
def prepare_chunks(
    key: tl.tensor,
    value: tl.tensor,
    decay: tl.tensor,
    step: tl.tensor,
    first: tl.tensor,
    reads: tl.tensor,
    added: tl.tensor,
    inverses: tl.tensor,
    batches: tl.tensor,
    tokens: tl.tensor,
    begin: tl.tensor,
    start: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Write `reads`, `added` as if no state entered, and the inverse of 1 + `system` of a chunk of one head."""
    chunk, batch, head = tl.program_id(0), tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    index = tl.arange(0, SIZE)
    row = (chunk * SIZE + index).to(tl.int64) * batches + batch
    pairs, inflow, _, _ = _factors(decay, first, chunk, batch, head, batches, tokens, begin, start, HEADS, SIZE)
    own_step = tl.load(step + row * HEADS + head)
    products = tl.zeros((SIZE, SIZE), tl.float32)
    for at in range(0, KEY_WIDTH, COLUMNS):
        k = _tile(key, row, key_stride, head // SHARED, at, KEY_WIDTH, COLUMNS)
        products = tl.dot(k, tl.trans(k), products)
    system = tl.where(index[:, None] > index[None, :], products * pairs * own_step[:, None], 0.0)
    solved = _inverse(system, SIZE, LEVELS, PRECISION)
    if inverses is not None:
        number = (chunk * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        tl.store(inverses + (number * SIZE + index[:, None]) * SIZE + index[None, :], solved)
    for at in range(0, KEY_WIDTH, COLUMNS):
        k = _tile(key, row, key_stride, head // SHARED, at, KEY_WIDTH, COLUMNS)
        found = tl.dot(solved, k.to(tl.float32) * (own_step * inflow)[:, None], input_precision="tf32")
        _store_tile(reads, row, head, at, found, HEADS, KEY_WIDTH, COLUMNS)
    for at in range(0, WIDTH, COLUMNS):
        v = _tile(value, row, value_stride, head, at, WIDTH, COLUMNS)
        found = tl.dot(solved, v.to(tl.float32) * own_step[:, None], input_precision="tf32")
        _store_tile(added, row, head, at, found, HEADS, WIDTH, COLUMNS)


@triton.jit(do_not_specialize=["chunks", "tokens", "begin", "start"])
def run_states(
    key: tl.tensor,
    value: tl.tensor,
    decay: tl.tensor,
    step: tl.tensor,
    first: tl.tensor,
    reads: tl.tensor,
    added: tl.tensor,
    state: tl.tensor,
    states: tl.tensor,
    last: tl.tensor,
    chunks: tl.tensor,
    batches: tl.tensor,
    tokens: tl.tensor,
    begin: tl.tensor,
    start: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the state before each chunk and after the last of one head, in some columns, and complete `added`.

    Without the delta rule, `reads` is None, and `added` is step * value and not written.
    """
    number, at = tl.program_id(0), tl.program_id(1) * COLUMNS
    batch, head = number // HEADS, number % HEADS
    place, inside = _matrix(number, 0, at, KEY_WIDTH, WIDTH, KEY_COLUMNS, COLUMNS)
    own = tl.load(state + place, mask=inside, other=0.0)
    for chunk in range(0, chunks):
        row = (chunk * SIZE + tl.arange(0, SIZE)).to(tl.int64) * batches + batch
        before, _ = _matrix(chunk * tl.num_programs(0) + number, 0, at, KEY_WIDTH, WIDTH, KEY_COLUMNS, COLUMNS)
        tl.store(states + before, own, mask=inside)
        _, _, outflow, keep = _factors(decay, first, chunk, batch, head, batches, tokens, begin, start, HEADS, SIZE)
        if reads is None:
            v = _tile(value, row, value_stride, head, at, WIDTH, COLUMNS)
            gained = v.to(tl.float32) * tl.load(step + row * HEADS + head)[:, None]
        else:
            gained = _tile(added, row, HEADS * WIDTH, head, at, WIDTH, COLUMNS)
            read = _tile(reads, row, HEADS * KEY_WIDTH, head, 0, KEY_WIDTH, KEY_COLUMNS)
            gained -= tl.dot(read, own, input_precision="tf32")
            _store_tile(added, row, head, at, gained, HEADS, WIDTH, COLUMNS)
        k = _tile(key, row, key_stride, head // SHARED, 0, KEY_WIDTH, KEY_COLUMNS)
        own = tl.dot(tl.trans(k.to(tl.float32)), gained * outflow[:, None], own * keep, input_precision="tf32")
    tl.store(last + place, own, mask=inside)


@triton.jit(do_not_specialize=["tokens", "begin", "start"])
def compute_outputs(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    decay: tl.tensor,
    step: tl.tensor,
    first: tl.tensor,
    added: tl.tensor,
    states: tl.tensor,
    output: tl.tensor,
    batches: tl.tensor,
    tokens: tl.tensor,
    begin: tl.tensor,
    start: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the outputs of a chunk of one head, in some columns. `added` is None if it is step * value."""
    chunk, at = tl.program_id(0), tl.program_id(2) * COLUMNS
    batch, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    row = (chunk * SIZE + tl.arange(0, SIZE)).to(tl.int64) * batches + batch
    pairs, inflow, _, _ = _factors(decay, first, chunk, batch, head, batches, tokens, begin, start, HEADS, SIZE)
    scores, seen = tl.zeros((SIZE, SIZE), tl.float32), tl.zeros((SIZE, COLUMNS), tl.float32)
    number = chunk * tl.num_programs(1) + tl.program_id(1)
    for key_at in range(0, KEY_WIDTH, KEY_COLUMNS):
        q = _tile(query, row, query_stride, head // SHARED, key_at, KEY_WIDTH, KEY_COLUMNS)
        k = _tile(key, row, key_stride, head // SHARED, key_at, KEY_WIDTH, KEY_COLUMNS)
        place, inside = _matrix(number, key_at, at, KEY_WIDTH, WIDTH, KEY_COLUMNS, COLUMNS)
        state = tl.load(states + place, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), scores)
        seen = tl.dot(q.to(tl.float32), state, seen, input_precision="tf32")
    if added is None:
        v = _tile(value, row, value_stride, head, at, WIDTH, COLUMNS)
        gained = v.to(tl.float32) * tl.load(step + row * HEADS + head)[:, None]
    else:
        gained = _tile(added, row, HEADS * WIDTH, head, at, WIDTH, COLUMNS)
    found = tl.dot(scores * pairs, gained, seen * inflow[:, None], input_precision="tf32")
    _store_tile(output, row, head, at, found, HEADS, WIDTH, COLUMNS)


@triton.jit(do_not_specialize=["tokens", "begin", "start"])
def begin_back(
    query: tl.tensor,
    key: tl.tensor,
    decay: tl.tensor,
    first: tl.tensor,
    output_gradient: tl.tensor,
    reads: tl.tensor,
    added: tl.tensor,
    states: tl.tensor,
    added_gradient: tl.tensor,
    batches: tl.tensor,
    tokens: tl.tensor,
    begin: tl.tensor,
    start: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    gradient_stride: tl.tensor,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the gradient of `added` of a chunk of one head by its outputs, in some columns, and complete `added`.

    `reads` and `added` are None without the delta rule.
    """
    chunk, at = tl.program_id(0), tl.program_id(2) * COLUMNS
    batch, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    row = (chunk * SIZE + tl.arange(0, SIZE)).to(tl.int64) * batches + batch
    pairs, _, _, _ = _factors(decay, first, chunk, batch, head, batches, tokens, begin, start, HEADS, SIZE)
    scores, seen = tl.zeros((SIZE, SIZE), tl.float32), tl.zeros((SIZE, COLUMNS), tl.float32)
    number = chunk * tl.num_programs(1) + tl.program_id(1)
    for key_at in range(0, KEY_WIDTH, KEY_COLUMNS):
        q = _tile(query, row, query_stride, head // SHARED, key_at, KEY_WIDTH, KEY_COLUMNS)
        k = _tile(key, row, key_stride, head // SHARED, key_at, KEY_WIDTH, KEY_COLUMNS)
        scores = tl.dot(q, tl.trans(k), scores)
        if reads is not None:
            place, inside = _matrix(number, key_at, at, KEY_WIDTH, WIDTH, KEY_COLUMNS, COLUMNS)
            state = tl.load(states + place, mask=inside, other=0.0)
            read = _tile(reads, row, HEADS * KEY_WIDTH, head, key_at, KEY_WIDTH, KEY_COLUMNS)
            seen = tl.dot(read, state, seen, input_precision="tf32")
    if reads is not None:
        gained = _tile(added, row, HEADS * WIDTH, head, at, WIDTH, COLUMNS) - seen
        _store_tile(added, row, head, at, gained, HEADS, WIDTH, COLUMNS)
    arriving = _tile(output_gradient, row, gradient_stride, head, at, WIDTH, COLUMNS).to(tl.float32)
    found = tl.dot(tl.trans(scores * pairs), arriving, input_precision="tf32")
    _store_tile(added_gradient, row, head, at, found, HEADS, WIDTH, COLUMNS)


@triton.jit(do_not_specialize=["chunks", "tokens", "begin", "start"])
def go_back(
    query: tl.tensor,
    key: tl.tensor,
    decay: tl.tensor,
    first: tl.tensor,
    output_gradient: tl.tensor,
    reads: tl.tensor,
    gradient: tl.tensor,
    added_gradient: tl.tensor,
    leaving: tl.tensor,
    entering: tl.tensor,
    chunks: tl.tensor,
    batches: tl.tensor,
    tokens: tl.tensor,
    begin: tl.tensor,
    start: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    gradient_stride: tl.tensor,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write gradients of the state after each chunk and before the first of one head, and complete that of `added`.

    They are of some columns. `gradient` is that of the state after the last chunk. `reads` is None without the delta
    rule.
    """
    number, at = tl.program_id(0), tl.program_id(1) * COLUMNS
    batch, head = number // HEADS, number % HEADS
    place, inside = _matrix(number, 0, at, KEY_WIDTH, WIDTH, KEY_COLUMNS, COLUMNS)
    own = tl.load(gradient + place, mask=inside, other=0.0)
    for later in range(0, chunks):
        chunk = chunks - 1 - later
        row = (chunk * SIZE + tl.arange(0, SIZE)).to(tl.int64) * batches + batch
        after, _ = _matrix(chunk * tl.num_programs(0) + number, 0, at, KEY_WIDTH, WIDTH, KEY_COLUMNS, COLUMNS)
        tl.store(leaving + after, own, mask=inside)
        _, inflow, outflow, keep = _factors(
            decay, first, chunk, batch, head, batches, tokens, begin, start, HEADS, SIZE
        )
        k = _tile(key, row, key_stride, head // SHARED, 0, KEY_WIDTH, KEY_COLUMNS)
        of_added = tl.dot(k.to(tl.float32), own, input_precision="tf32") * outflow[:, None]
        of_added += _tile(added_gradient, row, HEADS * WIDTH, head, at, WIDTH, COLUMNS)
        _store_tile(added_gradient, row, head, at, of_added, HEADS, WIDTH, COLUMNS)
        q = _tile(query, row, query_stride, head // SHARED, 0, KEY_WIDTH, KEY_COLUMNS)
        arriving = _tile(output_gradient, row, gradient_stride, head, at, WIDTH, COLUMNS).to(tl.float32)
        asked = tl.trans(q.to(tl.float32))
        own = tl.dot(asked, arriving * inflow[:, None], own * keep, input_precision="tf32")
        if reads is not None:
            read = _tile(reads, row, HEADS * KEY_WIDTH, head, 0, KEY_WIDTH, KEY_COLUMNS)
            own -= tl.dot(tl.trans(read), of_added, input_precision="tf32")
    tl.store(entering + place, own, mask=inside)


@triton.jit(do_not_specialize=["tokens", "begin", "start"])
def compute_pair_gradients(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    decay: tl.tensor,
    step: tl.tensor,
    first: tl.tensor,
    output_gradient: tl.tensor,
    added: tl.tensor,
    added_gradient: tl.tensor,
    inverses: tl.tensor,
    product_gradient: tl.tensor,
    system_gradient: tl.tensor,
    value_gradient: tl.tensor,
    decay_gradient: tl.tensor,
    step_gradient: tl.tensor,
    batches: tl.tensor,
    tokens: tl.tensor,
    begin: tl.tensor,
    start: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    gradient_stride: tl.tensor,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write what of a chunk's gradients are sums over the columns of the value, for one head.

    They are those of query key^T, of key key^T, of the value, and a share of those of decay and step. With the delta
    rule, the gradient of `added` is replaced by that of the right side of its system. Without it, `inverses`, `added`
    and `system_gradient` are None.
    """
    chunk, batch, head = tl.program_id(0), tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    index = tl.arange(0, SIZE)
    row = (chunk * SIZE + index).to(tl.int64) * batches + batch
    number = (chunk * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    square = (number * SIZE + index[:, None]) * SIZE + index[None, :]
    own_step = tl.load(step + row * HEADS + head)
    of_scores, of_system = tl.zeros((SIZE, SIZE), tl.float32), tl.zeros((SIZE, SIZE), tl.float32)
    of_step = tl.zeros((SIZE,), tl.float32)
    for at in range(0, WIDTH, COLUMNS):
        v = _tile(value, row, value_stride, head, at, WIDTH, COLUMNS).to(tl.float32)
        right = _tile(added_gradient, row, HEADS * WIDTH, head, at, WIDTH, COLUMNS)
        gained = v * own_step[:, None]
        if inverses is not None:
            gained = _tile(added, row, HEADS * WIDTH, head, at, WIDTH, COLUMNS)
            right = tl.dot(tl.trans(tl.load(inverses + square)), right, input_precision="tf32")
            of_system = tl.dot(right, tl.trans(gained), of_system, input_precision="tf32")
            _store_tile(added_gradient, row, head, at, right, HEADS, WIDTH, COLUMNS)
        arriving = _tile(output_gradient, row, gradient_stride, head, at, WIDTH, COLUMNS).to(tl.float32)
        of_scores = tl.dot(arriving, tl.trans(gained), of_scores, input_precision="tf32")
        of_step += tl.sum(right * v, 1)
        _store_tile(value_gradient, row, head, at, right * own_step[:, None], HEADS, WIDTH, COLUMNS)
    pairs, _, _, _ = _factors(decay, first, chunk, batch, head, batches, tokens, begin, start, HEADS, SIZE)
    of_scores *= pairs
    tl.store(product_gradient + square, of_scores)
    scores = tl.zeros((SIZE, SIZE), tl.float32)
    for at in range(0, KEY_WIDTH, COLUMNS):
        q = _tile(query, row, query_stride, head // SHARED, at, KEY_WIDTH, COLUMNS)
        k = _tile(key, row, key_stride, head // SHARED, at, KEY_WIDTH, COLUMNS)
        scores = tl.dot(q, tl.trans(k), scores)
    of_decays = of_scores * scores
    below = index[:, None] > index[None, :]
    if inverses is not None:
        products = tl.zeros((SIZE, SIZE), tl.float32)
        for at in range(0, KEY_WIDTH, COLUMNS):
            k = _tile(key, row, key_stride, head // SHARED, at, KEY_WIDTH, COLUMNS)
            products = tl.dot(k, tl.trans(k), products)
        of_system = tl.where(below, -of_system * pairs, 0.0)
        of_step += tl.sum(of_system * products, 1)
        of_system *= own_step[:, None]
        of_decays += of_system * products
        tl.store(system_gradient + square, of_system)
    of_decays = tl.where(below, of_decays, 0.0)
    tl.store(decay_gradient + row * HEADS + head, _from_the_end(tl.sum(of_decays, 1) - tl.sum(of_decays, 0)))
    tl.store(step_gradient + row * HEADS + head, of_step)


@triton.jit(do_not_specialize=["tokens", "begin", "start"])
def compute_key_gradients(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    decay: tl.tensor,
    step: tl.tensor,
    first: tl.tensor,
    output_gradient: tl.tensor,
    added: tl.tensor,
    right_gradient: tl.tensor,
    product_gradient: tl.tensor,
    system_gradient: tl.tensor,
    states: tl.tensor,
    leaving: tl.tensor,
    query_gradient: tl.tensor,
    key_gradient: tl.tensor,
    decay_gradient: tl.tensor,
    step_gradient: tl.tensor,
    batches: tl.tensor,
    tokens: tl.tensor,
    begin: tl.tensor,
    start: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    gradient_stride: tl.tensor,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the gradients of query and key of a chunk of one head, in some columns, for each head its own.

    To each block of columns belongs a share in the gradients of decay and step. `added` and `system_gradient` are None
    without the delta rule.
    """
    chunk, key_at = tl.program_id(0), tl.program_id(2) * KEY_COLUMNS
    batch, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    index = tl.arange(0, SIZE)
    row = (chunk * SIZE + index).to(tl.int64) * batches + batch
    number = chunk * tl.num_programs(1) + tl.program_id(1)
    own_step = tl.load(step + row * HEADS + head)
    of_query, of_key = tl.zeros((SIZE, KEY_COLUMNS), tl.float32), tl.zeros((SIZE, KEY_COLUMNS), tl.float32)
    seen, of_keep = tl.zeros((SIZE, KEY_COLUMNS), tl.float32), tl.zeros((KEY_COLUMNS,), tl.float32)
    for at in range(0, WIDTH, COLUMNS):
        place, inside = _matrix(number, key_at, at, KEY_WIDTH, WIDTH, KEY_COLUMNS, COLUMNS)
        state = tl.load(states + place, mask=inside, other=0.0)
        after = tl.load(leaving + place, mask=inside, other=0.0)
        of_keep += tl.sum(state * after, 1)
        arriving = _tile(output_gradient, row, gradient_stride, head, at, WIDTH, COLUMNS).to(tl.float32)
        of_query = tl.dot(arriving, tl.trans(state), of_query, input_precision="tf32")
        if added is None:
            gained = _tile(value, row, value_stride, head, at, WIDTH, COLUMNS).to(tl.float32) * own_step[:, None]
        else:
            gained = _tile(added, row, HEADS * WIDTH, head, at, WIDTH, COLUMNS)
            right = _tile(right_gradient, row, HEADS * WIDTH, head, at, WIDTH, COLUMNS)
            seen = tl.dot(right, tl.trans(state), seen, input_precision="tf32")
        of_key = tl.dot(gained, tl.trans(after), of_key, input_precision="tf32")
    _, inflow, outflow, keep = _factors(decay, first, chunk, batch, head, batches, tokens, begin, start, HEADS, SIZE)
    q = _tile(query, row, query_stride, head // SHARED, key_at, KEY_WIDTH, KEY_COLUMNS).to(tl.float32)
    k = _tile(key, row, key_stride, head // SHARED, key_at, KEY_WIDTH, KEY_COLUMNS).to(tl.float32)
    of_query *= inflow[:, None]
    of_key *= outflow[:, None]
    of_outflow = tl.sum(of_key * k, 1)
    of_total = tl.sum(of_query * q, 1) - of_outflow
    of_total += tl.where(index == SIZE - 1, tl.sum(of_outflow, 0) + tl.sum(of_keep, 0) * keep, 0.0)
    of_step = tl.zeros((SIZE,), tl.float32)
    square = (number.to(tl.int64) * SIZE + index[:, None]) * SIZE + index[None, :]
    if added is not None:
        seen *= inflow[:, None]
        of_step -= tl.sum(seen * k, 1)
        of_total += of_step * own_step
        of_key -= seen * own_step[:, None]
        of_system = tl.load(system_gradient + square)
        of_key = tl.dot(of_system + tl.trans(of_system), k, of_key, input_precision="tf32")
    of_products = tl.load(product_gradient + square)
    of_query = tl.dot(of_products, k, of_query, input_precision="tf32")
    _store_tile(query_gradient, row, head, key_at, of_query, HEADS, KEY_WIDTH, KEY_COLUMNS)
    of_key = tl.dot(tl.trans(of_products), q, of_key, input_precision="tf32")
    _store_tile(key_gradient, row, head, key_at, of_key, HEADS, KEY_WIDTH, KEY_COLUMNS)
    share = tl.program_id(2) * tl.num_programs(0).to(tl.int64) * SIZE * batches + row
    tl.store(decay_gradient + share * HEADS + head, _from_the_end(of_total))
    tl.store(step_gradient + share * HEADS + head, of_step)


# ------------------------------------------------------------------------------------------------- launchers


class KernelPart(Part):
    """A segment's tokens, whose chunks kernels compute. `run` and `back` are those of `Part`."""

    def run(self, states: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute all chunks from the state before them, and write that before each into `states`."""
        query, key, value, decay, step = rows = self._rows()
        sizes, strides = self._sizes(), [each.stride(0) for each in rows[:3]]
        heads = len(states[0])
        output, last = (
            torch.empty_like(self.inputs.value, memory_format=torch.contiguous_format),
            torch.empty_like(state),
        )
        reads, added, _ = self._prepare(rows, inverses=False)
        key_columns = _columns(sizes.KEY_WIDTH, WIDEST)
        run_states[(heads, -(-sizes.WIDTH // STATE_COLUMNS))](
            *(key, value, decay, step, self._first, reads, added, state.contiguous(), states, last),
            *(self.chunks.count, *self._places(), *strides[1:]),
            **sizes._asdict(),
            KEY_COLUMNS=key_columns,
            COLUMNS=STATE_COLUMNS,
            num_warps=_warps(sizes.SIZE * key_columns),
        )
        columns = _columns(sizes.WIDTH, COLUMNS)
        compute_outputs[(self.chunks.count, heads, -(-sizes.WIDTH // columns))](
            *(query, key, value, decay, step, self._first, added, states, output, *self._places(), *strides),
            **sizes._asdict(),
            KEY_COLUMNS=_columns(sizes.KEY_WIDTH, COLUMNS),
            COLUMNS=columns,
            num_warps=8,
        )
        return self.chunks.cut(output), last

    def back(self, states: Tensor, grad_output: Tensor, gradient: Tensor) -> tuple[list[Tensor], Tensor]:
        """Go back through all chunks with the gradient of the state after them."""
        query, key, value, decay, step = rows = self._rows()
        sizes, strides = self._sizes(), [each.stride(0) for each in rows[:3]]
        heads, arriving = len(gradient), as_rows(grad_output.flatten(2))
        reads, added, inverses = self._prepare(rows, inverses=True)
        leaving, entering = torch.empty_like(states), torch.empty_like(gradient)
        of_added = torch.empty(value.shape, dtype=torch.float32, device=value.device)
        columns = _columns(sizes.WIDTH, COLUMNS)
        begin_back[(self.chunks.count, heads, -(-sizes.WIDTH // columns))](
            *(query, key, decay, self._first, arriving, reads, added, states, of_added, *self._places()),
            *(*strides[:2], arriving.stride(0)),
            **sizes._asdict(),
            KEY_COLUMNS=_columns(sizes.KEY_WIDTH, COLUMNS),
            COLUMNS=columns,
            num_warps=8,
        )
        key_columns = _columns(sizes.KEY_WIDTH, WIDEST)
        go_back[(heads, -(-sizes.WIDTH // STATE_COLUMNS))](
            *(query, key, decay, self._first, arriving, reads, gradient.contiguous()),
            *(of_added, leaving, entering, self.chunks.count, *self._places(), *strides[:2], arriving.stride(0)),
            **sizes._asdict(),
            KEY_COLUMNS=key_columns,
            COLUMNS=STATE_COLUMNS,
            num_warps=_warps(sizes.SIZE * key_columns),
        )
        of_value = torch.empty_like(self.inputs.value, memory_format=torch.contiguous_format)
        key_columns = _columns(sizes.KEY_WIDTH, COLUMNS)
        blocks = -(-sizes.KEY_WIDTH // key_columns)
        shares = torch.empty(2, 1 + blocks, *decay.shape, dtype=torch.float32, device=decay.device)
        of_products = self.new(sizes.SIZE, sizes.SIZE)
        of_system = self.new(sizes.SIZE, sizes.SIZE) if self._delta else None
        compute_pair_gradients[(self.chunks.count, heads)](
            *(query, key, value, decay, step, self._first, arriving, added, of_added, inverses),
            *(of_products, of_system, of_value, shares[0], shares[1], *self._places(), *strides, arriving.stride(0)),
            **sizes._asdict(),
            COLUMNS=STATE_COLUMNS,
            num_warps=8,
        )
        dtype = query.dtype if sizes.SHARED == 1 else torch.float32
        of_heads = torch.empty(2, *value.shape[:1], sizes.HEADS * sizes.KEY_WIDTH, dtype=dtype, device=query.device)
        compute_key_gradients[(self.chunks.count, heads, blocks)](
            *(query, key, value, decay, step, self._first, arriving, added, of_added, of_products, of_system),
            *(states, leaving, *of_heads, shares[0, 1:], shares[1, 1:], *self._places(), *strides),
            arriving.stride(0),
            **sizes._asdict(),
            KEY_COLUMNS=key_columns,
            COLUMNS=STATE_COLUMNS,
            num_warps=8,
        )
        shape = (*self.inputs.key.shape[:3], sizes.SHARED, sizes.KEY_WIDTH)
        of_keys = (each.view(shape).sum(dim=3).to(query.dtype) for each in of_heads)
        found = zip((*of_keys, of_value, *shares.sum(dim=1)), self.inputs, strict=True)
        return [self.chunks.cut(each.view(like.shape)) for each, like in found], entering

    def _rows(self) -> list[Tensor]:
        """Return the inputs as rows of all heads."""
        return [as_rows(each.flatten(2)) for each in self.inputs[:3]] + [
            each.contiguous().flatten(0, 1) for each in self.inputs[3:]
        ]

    def _sizes(self) -> _Sizes:
        """Return the sizes of the kernels."""
        _, _, heads, width = self.inputs.value.shape
        key_heads, key_width = self.inputs.key.shape[2:]
        return _Sizes(heads, heads // key_heads, key_width, width, self.chunks.size)

    def _places(self) -> tuple[int, int, int, int]:
        """Return the number of samples and of padded tokens, and where chunks and the segment begin in the sample."""
        length, batch = self.inputs.value.shape[:2]
        return batch, length, self.chunks.begin, self.chunks.start

    @property
    def _first(self) -> Tensor | None:
        return self.chunks.first()

    def _prepare(self, rows: Sequence[Tensor], *, inverses: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return `reads`, `added` and the inverses of the delta rule's chunks."""
        if not self._delta:
            return None, None, None
        _, key, value, decay, step = rows
        sizes, heads = self._sizes(), decay.shape[1] * self.inputs.value.shape[1]
        reads = torch.empty(len(key), sizes.HEADS * sizes.KEY_WIDTH, dtype=torch.float32, device=key.device)
        added = torch.empty(value.shape, dtype=torch.float32, device=key.device)
        solved = self.new(sizes.SIZE, sizes.SIZE) if inverses else None
        prepare_chunks[(self.chunks.count, heads)](
            *(
                key,
                value,
                decay,
                step,
                self._first,
                reads,
                added,
                solved,
                *self._places(),
                key.stride(0),
                value.stride(0),
            ),
            **sizes._asdict(),
            LEVELS=sizes.SIZE.bit_length() - 1,
            COLUMNS=_columns(max(sizes.KEY_WIDTH, sizes.WIDTH), COLUMNS),
            PRECISION="tf32x3" if launch.LANES == 32 else "ieee",
            num_warps=8,
        )
        return reads, added, solved


def _columns(width: int, most: int) -> int:
    """Return the columns of a tile of rows of this width."""
    return max(FEWEST, min(most, triton.next_power_of_2(width)))


def _warps(elements: int) -> int:
    """Return the warps for a tile of so many elements: 32 of each thread."""
    return max(4, min(8, elements // (32 * launch.LANES)))

"""Triton kernels of a recurrence, forward: see recurrence_kernels.py.

`prepare_chunks` solves the system of each chunk of the delta rule, `run_states` goes from chunk to chunk, and
`compute_outputs` computes the outputs of each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megalite_kernels.recurrence_parts_kernels import factors, inverse_of, load_tile, places_of_state, store_tile


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
) -> None:
    """Write `reads`, `added` as if no state entered, and the inverse of 1 + `system` of a chunk of one head."""
    chunk, batch, head = tl.program_id(0), tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    index = tl.arange(0, SIZE)
    row = (chunk * SIZE + index).to(tl.int64) * batches + batch
    pairs, inflow, _, _ = factors(decay, first, chunk, batch, head, batches, tokens, begin, start, HEADS, SIZE)
    own_step = tl.load(step + row * HEADS + head)
    products = tl.zeros((SIZE, SIZE), tl.float32)
    for at in range(0, KEY_WIDTH, COLUMNS):
        k = load_tile(key, row, key_stride, head // SHARED, at, KEY_WIDTH, COLUMNS)
        products = tl.dot(k, tl.trans(k), products)
    system = tl.where(index[:, None] > index[None, :], products * pairs * own_step[:, None], 0.0)
    solved = inverse_of(system, SIZE, LEVELS)
    if inverses is not None:
        number = (chunk * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        tl.store(inverses + (number * SIZE + index[:, None]) * SIZE + index[None, :], solved)
    for at in range(0, KEY_WIDTH, COLUMNS):
        k = load_tile(key, row, key_stride, head // SHARED, at, KEY_WIDTH, COLUMNS)
        found = tl.dot(solved, k.to(tl.float32) * (own_step * inflow)[:, None], input_precision="tf32")
        store_tile(reads, row, head, at, found, HEADS, KEY_WIDTH, COLUMNS)
    for at in range(0, WIDTH, COLUMNS):
        v = load_tile(value, row, value_stride, head, at, WIDTH, COLUMNS)
        found = tl.dot(solved, v.to(tl.float32) * own_step[:, None], input_precision="tf32")
        store_tile(added, row, head, at, found, HEADS, WIDTH, COLUMNS)


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
    place, inside = places_of_state(number, 0, at, KEY_WIDTH, WIDTH, KEY_COLUMNS, COLUMNS)
    own = tl.load(state + place, mask=inside, other=0.0)
    for chunk in range(chunks):
        row = (chunk * SIZE + tl.arange(0, SIZE)).to(tl.int64) * batches + batch
        before, _ = places_of_state(chunk * tl.num_programs(0) + number, 0, at, KEY_WIDTH, WIDTH, KEY_COLUMNS, COLUMNS)
        tl.store(states + before, own, mask=inside)
        _, _, outflow, keep = factors(decay, first, chunk, batch, head, batches, tokens, begin, start, HEADS, SIZE)
        if reads is None:
            v = load_tile(value, row, value_stride, head, at, WIDTH, COLUMNS)
            gained = v.to(tl.float32) * tl.load(step + row * HEADS + head)[:, None]
        else:
            gained = load_tile(added, row, HEADS * WIDTH, head, at, WIDTH, COLUMNS)
            read = load_tile(reads, row, HEADS * KEY_WIDTH, head, 0, KEY_WIDTH, KEY_COLUMNS)
            gained -= tl.dot(read, own, input_precision="tf32")
            store_tile(added, row, head, at, gained, HEADS, WIDTH, COLUMNS)
        k = load_tile(key, row, key_stride, head // SHARED, 0, KEY_WIDTH, KEY_COLUMNS)
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
    pairs, inflow, _, _ = factors(decay, first, chunk, batch, head, batches, tokens, begin, start, HEADS, SIZE)
    scores, seen = tl.zeros((SIZE, SIZE), tl.float32), tl.zeros((SIZE, COLUMNS), tl.float32)
    number = chunk * tl.num_programs(1) + tl.program_id(1)
    for key_at in range(0, KEY_WIDTH, KEY_COLUMNS):
        q = load_tile(query, row, query_stride, head // SHARED, key_at, KEY_WIDTH, KEY_COLUMNS)
        k = load_tile(key, row, key_stride, head // SHARED, key_at, KEY_WIDTH, KEY_COLUMNS)
        place, inside = places_of_state(number, key_at, at, KEY_WIDTH, WIDTH, KEY_COLUMNS, COLUMNS)
        state = tl.load(states + place, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), scores)
        seen = tl.dot(q.to(tl.float32), state, seen, input_precision="tf32")
    if added is None:
        v = load_tile(value, row, value_stride, head, at, WIDTH, COLUMNS)
        gained = v.to(tl.float32) * tl.load(step + row * HEADS + head)[:, None]
    else:
        gained = load_tile(added, row, HEADS * WIDTH, head, at, WIDTH, COLUMNS)
    found = tl.dot(scores * pairs, gained, seen * inflow[:, None], input_precision="tf32")
    store_tile(output, row, head, at, found, HEADS, WIDTH, COLUMNS)

"""Triton kernels of the way back through a recurrence: see recurrence_kernels.py.

`begin_back` computes what of each chunk needs no gradient of the state, `go_back` goes from chunk to chunk in reverse,
and `compute_pair_gradients` and `compute_key_gradients` compute the gradients of each chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megalite_kernels.recurrence_parts_kernels import factors, from_the_end, load_tile, places_of_state, store_tile


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
    pairs, _, _, _ = factors(decay, first, chunk, batch, head, batches, tokens, begin, start, HEADS, SIZE)
    scores, seen = tl.zeros((SIZE, SIZE), tl.float32), tl.zeros((SIZE, COLUMNS), tl.float32)
    number = chunk * tl.num_programs(1) + tl.program_id(1)
    for key_at in range(0, KEY_WIDTH, KEY_COLUMNS):
        q = load_tile(query, row, query_stride, head // SHARED, key_at, KEY_WIDTH, KEY_COLUMNS)
        k = load_tile(key, row, key_stride, head // SHARED, key_at, KEY_WIDTH, KEY_COLUMNS)
        scores = tl.dot(q, tl.trans(k), scores)
        if reads is not None:
            place, inside = places_of_state(number, key_at, at, KEY_WIDTH, WIDTH, KEY_COLUMNS, COLUMNS)
            state = tl.load(states + place, mask=inside, other=0.0)
            read = load_tile(reads, row, HEADS * KEY_WIDTH, head, key_at, KEY_WIDTH, KEY_COLUMNS)
            seen = tl.dot(read, state, seen, input_precision="tf32")
    if reads is not None:
        gained = load_tile(added, row, HEADS * WIDTH, head, at, WIDTH, COLUMNS) - seen
        store_tile(added, row, head, at, gained, HEADS, WIDTH, COLUMNS)
    arriving = load_tile(output_gradient, row, gradient_stride, head, at, WIDTH, COLUMNS).to(tl.float32)
    found = tl.dot(tl.trans(scores * pairs), arriving, input_precision="tf32")
    store_tile(added_gradient, row, head, at, found, HEADS, WIDTH, COLUMNS)


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
    place, inside = places_of_state(number, 0, at, KEY_WIDTH, WIDTH, KEY_COLUMNS, COLUMNS)
    own = tl.load(gradient + place, mask=inside, other=0.0)
    for later in range(chunks):
        chunk = chunks - 1 - later
        row = (chunk * SIZE + tl.arange(0, SIZE)).to(tl.int64) * batches + batch
        after, _ = places_of_state(chunk * tl.num_programs(0) + number, 0, at, KEY_WIDTH, WIDTH, KEY_COLUMNS, COLUMNS)
        tl.store(leaving + after, own, mask=inside)
        _, inflow, outflow, keep = factors(decay, first, chunk, batch, head, batches, tokens, begin, start, HEADS, SIZE)
        k = load_tile(key, row, key_stride, head // SHARED, 0, KEY_WIDTH, KEY_COLUMNS)
        of_added = tl.dot(k.to(tl.float32), own, input_precision="tf32") * outflow[:, None]
        of_added += load_tile(added_gradient, row, HEADS * WIDTH, head, at, WIDTH, COLUMNS)
        store_tile(added_gradient, row, head, at, of_added, HEADS, WIDTH, COLUMNS)
        q = load_tile(query, row, query_stride, head // SHARED, 0, KEY_WIDTH, KEY_COLUMNS)
        arriving = load_tile(output_gradient, row, gradient_stride, head, at, WIDTH, COLUMNS).to(tl.float32)
        asked = tl.trans(q.to(tl.float32))
        own = tl.dot(asked, arriving * inflow[:, None], own * keep, input_precision="tf32")
        if reads is not None:
            read = load_tile(reads, row, HEADS * KEY_WIDTH, head, 0, KEY_WIDTH, KEY_COLUMNS)
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
        v = load_tile(value, row, value_stride, head, at, WIDTH, COLUMNS).to(tl.float32)
        right = load_tile(added_gradient, row, HEADS * WIDTH, head, at, WIDTH, COLUMNS)
        gained = v * own_step[:, None]
        if inverses is not None:
            gained = load_tile(added, row, HEADS * WIDTH, head, at, WIDTH, COLUMNS)
            right = tl.dot(tl.trans(tl.load(inverses + square)), right, input_precision="tf32")
            of_system = tl.dot(right, tl.trans(gained), of_system, input_precision="tf32")
            store_tile(added_gradient, row, head, at, right, HEADS, WIDTH, COLUMNS)
        arriving = load_tile(output_gradient, row, gradient_stride, head, at, WIDTH, COLUMNS).to(tl.float32)
        of_scores = tl.dot(arriving, tl.trans(gained), of_scores, input_precision="tf32")
        of_step += tl.sum(right * v, 1)
        store_tile(value_gradient, row, head, at, right * own_step[:, None], HEADS, WIDTH, COLUMNS)
    pairs, _, _, _ = factors(decay, first, chunk, batch, head, batches, tokens, begin, start, HEADS, SIZE)
    of_scores *= pairs
    tl.store(product_gradient + square, of_scores)
    scores = tl.zeros((SIZE, SIZE), tl.float32)
    for at in range(0, KEY_WIDTH, COLUMNS):
        q = load_tile(query, row, query_stride, head // SHARED, at, KEY_WIDTH, COLUMNS)
        k = load_tile(key, row, key_stride, head // SHARED, at, KEY_WIDTH, COLUMNS)
        scores = tl.dot(q, tl.trans(k), scores)
    of_decays = of_scores * scores
    below = index[:, None] > index[None, :]
    if inverses is not None:
        products = tl.zeros((SIZE, SIZE), tl.float32)
        for at in range(0, KEY_WIDTH, COLUMNS):
            k = load_tile(key, row, key_stride, head // SHARED, at, KEY_WIDTH, COLUMNS)
            products = tl.dot(k, tl.trans(k), products)
        of_system = tl.where(below, -of_system * pairs, 0.0)
        of_step += tl.sum(of_system * products, 1)
        of_system *= own_step[:, None]
        of_decays += of_system * products
        tl.store(system_gradient + square, of_system)
    of_decays = tl.where(below, of_decays, 0.0)
    tl.store(decay_gradient + row * HEADS + head, from_the_end(tl.sum(of_decays, 1) - tl.sum(of_decays, 0)))
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
        place, inside = places_of_state(number, key_at, at, KEY_WIDTH, WIDTH, KEY_COLUMNS, COLUMNS)
        state = tl.load(states + place, mask=inside, other=0.0)
        after = tl.load(leaving + place, mask=inside, other=0.0)
        of_keep += tl.sum(state * after, 1)
        arriving = load_tile(output_gradient, row, gradient_stride, head, at, WIDTH, COLUMNS).to(tl.float32)
        of_query = tl.dot(arriving, tl.trans(state), of_query, input_precision="tf32")
        if added is None:
            gained = load_tile(value, row, value_stride, head, at, WIDTH, COLUMNS).to(tl.float32) * own_step[:, None]
        else:
            gained = load_tile(added, row, HEADS * WIDTH, head, at, WIDTH, COLUMNS)
            right = load_tile(right_gradient, row, HEADS * WIDTH, head, at, WIDTH, COLUMNS)
            seen = tl.dot(right, tl.trans(state), seen, input_precision="tf32")
        of_key = tl.dot(gained, tl.trans(after), of_key, input_precision="tf32")
    _, inflow, outflow, keep = factors(decay, first, chunk, batch, head, batches, tokens, begin, start, HEADS, SIZE)
    q = load_tile(query, row, query_stride, head // SHARED, key_at, KEY_WIDTH, KEY_COLUMNS).to(tl.float32)
    k = load_tile(key, row, key_stride, head // SHARED, key_at, KEY_WIDTH, KEY_COLUMNS).to(tl.float32)
    of_query *= inflow[:, None]
    of_key *= outflow[:, None]
    of_outflow = tl.sum(of_key * k, 1)
    of_inflow = tl.sum(of_query * q, 1)
    of_step = tl.zeros((SIZE,), tl.float32)
    square = (number.to(tl.int64) * SIZE + index[:, None]) * SIZE + index[None, :]
    if added is not None:
        seen *= inflow[:, None]
        of_step -= tl.sum(seen * k, 1)
        of_inflow += of_step * own_step
        of_key -= seen * own_step[:, None]
        of_system = tl.load(system_gradient + square)
        of_key = tl.dot(of_system + tl.trans(of_system), k, of_key, input_precision="tf32")
    of_products = tl.load(product_gradient + square)
    of_query = tl.dot(of_products, k, of_query, input_precision="tf32")
    store_tile(query_gradient, row, head, key_at, of_query, HEADS, KEY_WIDTH, KEY_COLUMNS)
    of_key = tl.dot(tl.trans(of_products), q, of_key, input_precision="tf32")
    store_tile(key_gradient, row, head, key_at, of_key, HEADS, KEY_WIDTH, KEY_COLUMNS)
    share = tl.program_id(2) * tl.num_programs(0).to(tl.int64) * SIZE * batches + row
    of_decay = from_the_end(of_inflow) + tl.cumsum(of_outflow, 0) - of_outflow + tl.sum(of_keep, 0) * keep
    tl.store(decay_gradient + share * HEADS + head, of_decay)
    tl.store(step_gradient + share * HEADS + head, of_step)

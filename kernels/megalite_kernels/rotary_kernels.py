"""Triton kernels of the rotation of queries and keys, and their launcher: see rotary.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import tile

# ------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def _rotate_heads(
    input: tl.tensor,
    output: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    positions: tl.tensor,
    program: tl.tensor,
    stride: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    cosine_stride: tl.tensor,
    cosine_batch_stride: tl.tensor,
    sine_stride: tl.tensor,
    sine_batch_stride: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Rotate ROWS heads of one sequence into a contiguous output, in the order of positions, then heads.

    The strides of the tables are in units of PAIRS elements, so that the compiler can infer their alignment.
    """
    batch, batches = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    row = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    position, head = row // HEADS, row % HEADS
    present = (position < positions)[:, None]
    source = input + (position * stride + batch * batch_stride + head * head_stride)[:, None]
    target = output + ((position * batches + batch) * HEADS + head)[:, None] * WIDTH
    pair = tl.arange(0, COLUMNS // 2)[None, :]
    turned = present & (pair < PAIRS)
    cosines = cosine + (position * cosine_stride + batch * cosine_batch_stride)[:, None] * PAIRS
    sines = sine + (position * sine_stride + batch * sine_batch_stride)[:, None] * PAIRS
    c = tl.load(cosines + pair, mask=turned, other=0.0).to(tl.float32)
    s = tl.load(sines + pair, mask=turned, other=0.0).to(tl.float32)
    if BACKWARD:
        s = -s
    column = tl.arange(0, COLUMNS)[None, :]
    if INTERLEAVED:
        inside = present & (column < 2 * PAIRS)
        x = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(x.reshape(ROWS, COLUMNS // 2, 2))
        y = tl.interleave(first * c - second * s, second * c + first * s)
        tl.store(target + column, y.to(output.dtype.element_ty), mask=inside)
    else:
        first = tl.load(source + pair, mask=turned, other=0.0).to(tl.float32)
        second = tl.load(source + PAIRS + pair, mask=turned, other=0.0).to(tl.float32)
        tl.store(target + pair, (first * c - second * s).to(output.dtype.element_ty), mask=turned)
        tl.store(target + PAIRS + pair, (second * c + first * s).to(output.dtype.element_ty), mask=turned)
    for start in tl.static_range(2 * PAIRS, WIDTH, COLUMNS):
        inside = present & (start + column < WIDTH)
        tl.store(target + start + column, tl.load(source + start + column, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["positions"])
def _rotate(
    query: tl.tensor,
    key: tl.tensor,
    query_output: tl.tensor,
    key_output: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    positions: tl.tensor,
    query_stride: tl.tensor,
    query_batch_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_stride: tl.tensor,
    key_batch_stride: tl.tensor,
    key_head_stride: tl.tensor,
    cosine_stride: tl.tensor,
    cosine_batch_stride: tl.tensor,
    sine_stride: tl.tensor,
    sine_batch_stride: tl.tensor,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Rotate queries in the first programs and keys in the others. The grid's second axis is the batch."""
    program = tl.program_id(0)
    queries = tl.cdiv(positions * QUERY_HEADS, ROWS)
    if program < queries:
        _rotate_heads(
            query, query_output, cosine, sine, positions, program,
            query_stride, query_batch_stride, query_head_stride,
            cosine_stride, cosine_batch_stride, sine_stride, sine_batch_stride,
            QUERY_HEADS, WIDTH, PAIRS, INTERLEAVED, BACKWARD, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        _rotate_heads(
            key, key_output, cosine, sine, positions, program - queries,
            key_stride, key_batch_stride, key_head_stride,
            cosine_stride, cosine_batch_stride, sine_stride, sine_batch_stride,
            KEY_HEADS, WIDTH, PAIRS, INTERLEAVED, BACKWARD, ROWS, COLUMNS,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------- launchers


def launch_rotate(
    query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, *, backward: bool
) -> tuple[Tensor, Tensor]:
    """Return rotated copies of query and key, [positions, batch, heads, width]; `backward` rotates them back."""
    positions, batches, heads, width = query.shape
    outputs = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in (query, key)]
    if positions and batches:
        query, key = [part if part.stride(-1) == 1 else part.contiguous() for part in (query, key)]
        pairs = cosine.shape[-1]
        (cosine, *cosine_strides), (sine, *sine_strides) = (
            _in_rows(table.expand(positions, batches, 1, pairs)) for table in (cosine, sine)
        )
        shape = tile(2 * pairs, largest=width)
        programs = sum(-(-positions * part.shape[2] // shape.rows) for part in (query, key))
        _rotate[(programs, batches)](
            *(query, key, *outputs, cosine, sine, positions, *query.stride()[:3], *key.stride()[:3]),
            *(*cosine_strides, *sine_strides, heads, key.shape[2], width, pairs),
            *(interleaved, backward, shape.rows, shape.columns),
            num_warps=shape.warps,
        )
    return outputs[0], outputs[1]


def _in_rows(table: Tensor) -> tuple[Tensor, int, int]:
    """Return the table and its strides between positions and between sequences, in units of rows of pairs."""
    pairs = table.shape[-1]
    if table.stride(-1) != 1 or table.stride(0) % pairs or table.stride(1) % pairs:
        table = table.contiguous()
    return table, table.stride(0) // pairs, table.stride(1) // pairs

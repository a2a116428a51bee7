"""Recurrences with one decay a head as Triton kernels: their launchers.

The names are those of recurrence_block.py. Inputs are in half precision, and all sums in fp32. Other factors of
products are rounded to tf32; states, decays and what stands outside of products are not.

Kernels read and write tokens as rows, [tokens * batch, heads * width], and what belongs to chunks as
[chunks, batch * heads, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from megalite_kernels import launch
from megalite_kernels.chunks import Segment
from megalite_kernels.launch import as_rows
from megalite_kernels.recurrence_backward_kernels import (
    begin_back,
    compute_key_gradients,
    compute_pair_gradients,
    go_back,
)
from megalite_kernels.recurrence_forward_kernels import compute_outputs, prepare_chunks, run_states
from megalite_kernels.recurrence_segment import WIDEST, Part

FEWEST = 16  # of each size of a tile: what tensor cores multiply
COLUMNS, STATE_COLUMNS = 64, 32


class _Sizes(NamedTuple):
    """Arguments of all kernels: heads, how many share a key head, widths of key and value, and tokens in a chunk."""

    HEADS: int
    SHARED: int
    KEY_WIDTH: int
    WIDTH: int
    SIZE: int

    def options(self) -> dict[str, int]:
        """Return them by name. With loads ahead of time, tiles would need more memory than most GPUs share."""
        return self._asdict() | {"num_stages": 1}


class KernelPart(Part):
    """A segment's tokens, whose chunks kernels compute. `run` and `back` are those of `Part`."""

    def __init__(self, segment: Segment, inputs: Sequence[Tensor], chunk: int, delta: bool) -> None:
        super().__init__(segment, inputs, chunk, delta)
        key_heads, key_width = self.inputs.key.shape[2:]
        heads, width = self.inputs.value.shape[2:]
        self._sizes = _Sizes(heads, heads // key_heads, key_width, width, chunk)
        first = self.chunks.first()
        self._first = None if first is None else first.contiguous()

    def run(self, states: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute all chunks from the state before them, and write that before each into `states`."""
        query, key, value, decay, step = rows = self._rows()
        sizes, strides = self._sizes, [each.stride(0) for each in rows[:3]]
        options = sizes.options()
        heads = len(states[0])
        output = torch.empty_like(self.inputs.value, memory_format=torch.contiguous_format)
        last = torch.empty_like(state)
        reads, added, _ = self._prepare(rows, inverses=False)
        key_columns = _columns(sizes.KEY_WIDTH, WIDEST)
        run_states[(heads, -(-sizes.WIDTH // STATE_COLUMNS))](
            *(key, value, decay, step, self._first, reads, added, state.contiguous(), states, last),
            *(self.chunks.count, *self._places(), *strides[1:]),
            **options,
            KEY_COLUMNS=key_columns,
            COLUMNS=STATE_COLUMNS,
            num_warps=4,
        )
        columns = _columns(sizes.WIDTH, COLUMNS)
        compute_outputs[(self.chunks.count, heads, -(-sizes.WIDTH // columns))](
            *(query, key, value, decay, step, self._first, added, states, output, *self._places(), *strides),
            **options,
            KEY_COLUMNS=_columns(sizes.KEY_WIDTH, COLUMNS),
            COLUMNS=columns,
            num_warps=8,
        )
        return self.chunks.cut(output), last

    def back(self, states: Tensor, grad_output: Tensor, gradient: Tensor) -> tuple[list[Tensor], Tensor]:
        """Go back through all chunks with the gradient of the state after them."""
        query, key, value, decay, step = rows = self._rows()
        sizes, strides = self._sizes, [each.stride(0) for each in rows[:3]]
        options = sizes.options()
        heads, arriving = len(gradient), as_rows(grad_output.flatten(2))
        reads, added, inverses = self._prepare(rows, inverses=True)
        leaving, entering = torch.empty_like(states), torch.empty_like(gradient)
        of_added = torch.empty(value.shape, dtype=torch.float32, device=value.device)
        columns = _columns(sizes.WIDTH, COLUMNS)
        begin_back[(self.chunks.count, heads, -(-sizes.WIDTH // columns))](
            *(query, key, decay, self._first, arriving, reads, added, states, of_added, *self._places()),
            *(*strides[:2], arriving.stride(0)),
            **options,
            KEY_COLUMNS=_columns(sizes.KEY_WIDTH, COLUMNS),
            COLUMNS=columns,
            num_warps=8,
        )
        key_columns = _columns(sizes.KEY_WIDTH, WIDEST)
        go_back[(heads, -(-sizes.WIDTH // STATE_COLUMNS))](
            *(query, key, decay, self._first, arriving, reads, gradient.contiguous()),
            *(of_added, leaving, entering, self.chunks.count, *self._places(), *strides[:2], arriving.stride(0)),
            **options,
            KEY_COLUMNS=key_columns,
            COLUMNS=STATE_COLUMNS,
            num_warps=256 // launch.LANES,
        )
        of_value = torch.empty_like(self.inputs.value, memory_format=torch.contiguous_format)
        key_columns = _columns(sizes.KEY_WIDTH, STATE_COLUMNS)
        blocks = -(-sizes.KEY_WIDTH // key_columns)
        shares = torch.empty(2, 1 + blocks, *decay.shape, dtype=torch.float32, device=decay.device)
        of_products = self.new(sizes.SIZE, sizes.SIZE)
        of_system = self.new(sizes.SIZE, sizes.SIZE) if self._delta else None
        compute_pair_gradients[(self.chunks.count, heads)](
            *(query, key, value, decay, step, self._first, arriving, added, of_added, inverses),
            *(of_products, of_system, of_value, shares[0], shares[1], *self._places(), *strides, arriving.stride(0)),
            **options,
            COLUMNS=FEWEST,
            num_warps=8,
        )
        dtype = query.dtype if sizes.SHARED == 1 else torch.float32
        of_heads = torch.empty(2, *value.shape[:1], sizes.HEADS * sizes.KEY_WIDTH, dtype=dtype, device=query.device)
        compute_key_gradients[(self.chunks.count, heads, blocks)](
            *(query, key, value, decay, step, self._first, arriving, added, of_added, of_products, of_system),
            *(states, leaving, *of_heads, shares[0, 1:], shares[1, 1:], *self._places(), *strides),
            arriving.stride(0),
            **options,
            KEY_COLUMNS=key_columns,
            COLUMNS=STATE_COLUMNS,
            num_warps=4,
        )
        shape = (*self.inputs.key.shape[:3], sizes.SHARED, sizes.KEY_WIDTH)
        of_keys = (each.view(shape).sum(dim=3).to(query.dtype) for each in of_heads)
        found = zip((*of_keys, of_value, *shares.sum(dim=1)), self.inputs, strict=True)
        return [self.chunks.cut(each.view(like.shape)) for each, like in found], entering

    def _rows(self) -> list[Tensor]:
        """Return the inputs as rows of all heads."""
        *of_heads, decay, step = self.inputs
        return [
            *(as_rows(each.flatten(2)) for each in of_heads),
            *(each.flatten(0, 1).contiguous() for each in (decay, step)),
        ]

    def _places(self) -> tuple[int, int, int, int]:
        """Return the number of samples and of padded tokens, and where chunks and the segment begin in the sample."""
        length, batch = self.inputs.value.shape[:2]
        return batch, length, self.chunks.begin, self.chunks.start

    def _prepare(self, rows: Sequence[Tensor], *, inverses: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return `reads`, `added` and the inverses of the delta rule's chunks."""
        if not self._delta:
            return None, None, None
        _, key, value, decay, step = rows
        sizes, heads = self._sizes, decay.shape[1] * self.inputs.value.shape[1]
        reads = torch.empty(len(key), sizes.HEADS * sizes.KEY_WIDTH, dtype=torch.float32, device=key.device)
        added = torch.empty(value.shape, dtype=torch.float32, device=key.device)
        solved = self.new(sizes.SIZE, sizes.SIZE) if inverses else None
        prepare_chunks[(self.chunks.count, heads)](
            *(key, value, decay, step, self._first, reads, added, solved, *self._places()),
            *(key.stride(0), value.stride(0)),
            **sizes.options(),
            LEVELS=sizes.SIZE.bit_length() - 1,
            COLUMNS=_columns(max(sizes.KEY_WIDTH, sizes.WIDTH), COLUMNS),
            num_warps=256 // launch.LANES,
        )
        return reads, added, solved


def _columns(width: int, most: int) -> int:
    """Return the columns of a tile of rows of this width."""
    return max(FEWEST, min(most, triton.next_power_of_2(width)))

"""Recurrences over tokens with a state of fixed size, computed in chunks: Mamba-2's and the gated delta rule.

A head has a state S [key width, value width]. Each token lets it decay and adds to it, then reads it:

    additive (arXiv:2405.21060):  S <- e^decay S + key (x) step * value;                          output = S^T query
    delta (arXiv:2412.06464):     S <- e^decay S;  S <- S + key (x) step * (value - S^T key);     output = S^T query

Within a chunk, let c be the cumulative sum of the decay, and L_ij = e^(c_i - c_j) for tokens j <= i of one document.
If S enters the chunk, then what its tokens add (`added`) is step * value, or with the delta rule the solution of

    (1 + step * (key key^T * L below the diagonal)) added = step * (value - e^c * key S)

The outputs are e^c * query S + (query key^T * L) added, and e^(c_last - c) * key, transposed, times `added` is what the
state gains. So only this sum runs from chunk to chunk. A document's first token sees no state from before it.

Backward keeps the inputs and the state before each chunk, and computes the rest again. Its own loop over chunks, in
reverse, is that of the gradient of the state. Decays, steps and states are in fp32 or wider, as are all sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite_kernels.chunks import Chunks, Segment
from megalite_kernels.launch import chunk_elements
from megalite_kernels.recurrence_block import Block, Inputs, go_back, prepare

__all__ = ["Scan", "Segment", "advance", "recurrence", "retreat", "step_once"]


class Scan(Protocol):
    """What other ranks, with the other segments of the samples, contribute."""

    def entering(self, maps: Sequence[tuple[Tensor, Tensor]], delta: bool) -> list[Tensor]:
        """Return the state that enters each own segment, from each one's map: see `advance`."""

    def leaving(self, maps: Sequence[tuple[Tensor, Tensor]], delta: bool) -> list[Tensor]:
        """Return the gradient of the state that leaves each own segment, from each one's adjoint: see `retreat`."""


def advance(matrix: Tensor, offset: Tensor, state: Tensor) -> Tensor:
    """Return the state after a segment: matrix @ state + offset.

    Args:
        matrix: [batch, heads, key width, key width]; of the additive recurrence, a number: [batch, heads, 1, 1].
        offset, state: [batch, heads, key width, value width].
    """
    return offset + (matrix @ state if matrix.shape[-1] == state.shape[-2] else matrix * state)


def retreat(matrix: Tensor, offset: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of the state before a segment, from that of the state after it: the adjoint of `advance`."""
    return advance(matrix.mT, offset, gradient)


def recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    step: Tensor,
    *,
    delta: bool,
    chunk: int,
    segments: Sequence[Segment] | None = None,
    state: Tensor | None = None,
    scan: Scan | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence over the tokens of all segments, one segment after another.

    Args:
        query, key: [tokens, batch, key heads, key width]. Consecutive heads share a key head.
        value: [tokens, batch, heads, value width].
        decay: logarithm of the factor of the state, <= 0, [tokens, batch, heads], in fp32 or wider.
        step: [tokens, batch, heads], in fp32 or wider.
        delta: take the delta rule.
        chunk: tokens in a chunk.
        segments: the tokens' places in the samples; None for the indices 0, 1, 2, ... of samples of one document.
        state: the state that enters the first segment, without a gradient; None for zeros. Not with a scan.
        scan: what brings each segment the state that enters it; None: each continues the one before it.

    Returns:
        The output [tokens, batch, heads, value width] in the dtype of `value`, and the state after the last segment
        [batch, heads, key width, value width], which has no gradient.
    """
    segments = [Segment(range(len(query)), None)] if segments is None else segments
    output, last = _Recurrence.apply(query, key, value, decay, step, state, segments, chunk, delta, scan)
    return output, last


def step_once(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, step: Tensor, *, delta: bool, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one token, by the recurrence itself.

    Args:
        query, key, value, decay, step: as in `recurrence`, of one token.
        state: [batch, heads, key width, value width].

    Returns:
        The output [1, batch, heads, value width], and the new state.
    """
    shared = value.shape[2] // key.shape[2]
    wide_query, wide_key = (
        each[0].to(state.dtype).repeat_interleave(shared, dim=1).unsqueeze(2) for each in (query, key)
    )
    added = value[0].to(state.dtype).unsqueeze(2)
    state = state * decay[0].to(state.dtype).exp()[..., None, None]
    if delta:
        added = added - wide_key @ state
    state = state + wide_key.mT * (added * step[0].to(state.dtype)[..., None, None])
    return (wide_query @ state).squeeze(2).unsqueeze(0).to(value.dtype), state


class _Part:
    """A segment's tokens, in blocks of chunks, whose matrices a processor's cache can hold.

    Attributes:
        chunks: the segment's chunks.
        blocks: the chunks of each block.
        inputs: the segment's tokens, padded to whole chunks.
        wide: the dtype of sums.
    """

    def __init__(self, segment: Segment, inputs: Sequence[Tensor], chunk: int, delta: bool) -> None:
        self.chunks = Chunks(segment, chunk)
        self.inputs = Inputs(*map(self.chunks.pad, inputs))
        self.wide = torch.promote_types(torch.promote_types(inputs[2].dtype, inputs[3].dtype), torch.float32)
        self._delta = delta
        _, batch, heads, width = self.inputs.value.shape
        of_chunk = batch * heads * chunk * max(chunk, width, self.inputs.key.shape[3])
        most = chunk_elements(self.inputs.value.device) // 2 // of_chunk  # half: there are many such tensors
        self.blocks = list(self.chunks.blocks(max(1, most)))

    def new(self, *shape: int) -> Tensor:
        """Return memory for matrices of all heads of each chunk, [chunks, batch * heads, ...]."""
        _, batch, heads, _ = self.inputs.value.shape
        return self.inputs.value.new_empty(self.chunks.count, batch * heads, *shape, dtype=self.wide)

    def split(self, block: slice, padded: Tensor) -> Tensor:
        """Take these chunks of padded tokens."""
        return self.chunks.split(padded, block, self.wide)

    def prepare(self, block: slice) -> Block:
        """Compute what of these chunks does not depend on states."""
        inputs = Inputs(*(self.split(block, each) for each in self.inputs))
        return prepare(inputs, self.chunks.documents(block), self.inputs.value.shape[1], self._delta)

    def run(self, states: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute all chunks from the state before them, and write that before each into `states`.

        Returns:
            The outputs, and the state after the last chunk.
        """
        output = torch.empty_like(self.inputs.value, memory_format=torch.contiguous_format)
        for own in self.blocks:
            block = self.prepare(own)
            state = block.run(states[own], state)
            self.chunks.join(output, own, block.output(states[own]))
        return self.chunks.cut(output), state

    def reached(self, reach: Tensor, grad_output: Tensor) -> Tensor:
        """Return the gradient of the state before the chunks, if that of the state after them is zero.

        Args:
            reach: see `_FromZero`.
        """
        parts = [reach[own].mT @ self.split(own, grad_output) for own in self.blocks]
        return torch.cat(parts).sum(dim=0)

    def back(self, states: Tensor, grad_output: Tensor, gradient: Tensor) -> tuple[list[Tensor], Tensor]:
        """Go back through all chunks with the gradient of the state after them.

        Returns:
            The gradients of the inputs, and that of the state before the chunks.
        """
        grads = Inputs(*(torch.empty_like(each, memory_format=torch.contiguous_format) for each in self.inputs))
        for own in reversed(self.blocks):
            found, gradient = go_back(self.prepare(own), states[own], self.split(own, grad_output), gradient)
            for target, of_chunks in zip(grads, found, strict=True):
                self.chunks.join(target, own, of_chunks)
        return [self.chunks.cut(each) for each in grads], gradient


class _FromZero:
    """A segment as if no state entered it, until `enter`.

    What a state adds is linear: matrix @ state to the state before each chunk, and `reach` @ state to the outputs. So
    the gradient of the state before the segment needs no way back through it.

    Attributes:
        map: matrix and offset of `advance`, without a dimension of samples.
        reach: [chunks, heads, chunk, key width].
    """

    def __init__(self, part: _Part, states: Tensor) -> None:
        width, key_width = part.inputs.value.shape[3], part.inputs.key.shape[3]
        self._part, self._states, self._matrices = part, states, []
        self._output = part.new(part.chunks.size, width)
        self.reach = part.new(part.chunks.size, key_width)
        state, matrix = torch.zeros_like(states[0]), None
        for own in part.blocks:
            block = part.prepare(own)
            state = block.run(states[own], state)
            matrices, matrix = block.matrices(matrix)
            self._output[own] = block.output(states[own])
            self.reach[own] = block.reach(matrices)
            self._matrices.append(matrices)
        assert matrix is not None
        self.map = matrix, state

    def enter(self, state: Tensor) -> Tensor:
        """Let a state enter, and return the outputs."""
        part = self._part
        output = torch.empty_like(part.inputs.value, memory_format=torch.contiguous_format)
        for own, matrices in zip(part.blocks, self._matrices, strict=True):
            self._states[own] = advance(matrices, self._states[own], state)
            part.chunks.join(output, own, self._output[own] + self.reach[own] @ state)
        return part.chunks.cut(output)


class _Recurrence(torch.autograd.Function):
    """Recurrence that saves its inputs and the state before each chunk; with a scan also what entering states reach."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        step: Tensor,
        state: Tensor | None,
        segments: Sequence[Segment],
        chunk: int,
        delta: bool,
        scan: Scan | None,
    ) -> tuple[Tensor, Tensor]:
        inputs = query, key, value, decay, step
        parts, heads = _parts(segments, inputs, chunk, delta), value.shape[1:3]
        states = [part.new(key.shape[3], value.shape[3]) for part in parts]
        last = torch.zeros_like(states[0][0]) if state is None else state.to(states[0].dtype).flatten(0, 1)
        outputs, of_maps = [], []
        if scan is None:
            for part, own in zip(parts, states, strict=True):
                output, last = part.run(own, last)
                outputs.append(output)
        else:
            runs = [_FromZero(part, own) for part, own in zip(parts, states, strict=True)]
            maps = [(run.map[0].unflatten(0, heads), run.map[1].unflatten(0, heads)) for run in runs]
            entering = [each.flatten(0, 1) for each in scan.entering(maps, delta)]
            outputs = [run.enter(each) for run, each in zip(runs, entering, strict=True)]
            last = advance(*runs[-1].map, entering[-1])
            of_maps = [*(matrix for matrix, _ in maps), *(run.reach for run in runs)]
        last = last.unflatten(0, heads)
        ctx.save_for_backward(*inputs, *states, *of_maps)
        ctx.segments, ctx.chunk, ctx.delta, ctx.scan = segments, chunk, delta, scan
        ctx.mark_non_differentiable(last)
        return _joined(outputs), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        inputs, rest = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        parts, heads = _parts(ctx.segments, inputs, ctx.chunk, ctx.delta), inputs[2].shape[1:3]
        count = len(parts)
        states, matrices, reaches = rest[:count], rest[count : 2 * count], rest[2 * count :]
        incoming = [
            part.chunks.pad(own)
            for part, own in zip(parts, grad_output.split([len(tokens) for tokens, _ in ctx.segments]), strict=True)
        ]
        gradient, leaving = torch.zeros_like(states[0][0]), []
        if ctx.scan is not None:
            of_parts = zip(parts, reaches, incoming, strict=True)
            offsets = [part.reached(reach, own).unflatten(0, heads) for part, reach, own in of_parts]
            maps = list(zip(matrices, offsets, strict=True))
            leaving = [each.flatten(0, 1) for each in ctx.scan.leaving(maps, ctx.delta)]
        found: list[list[Tensor]] = []
        for i in reversed(range(count)):
            grads, gradient = parts[i].back(states[i], incoming[i], leaving[i] if leaving else gradient)
            found.insert(0, grads)
        return *(_joined(of_parts) for of_parts in zip(*found, strict=True)), *[None] * 5


def _parts(segments: Sequence[Segment], inputs: Sequence[Tensor], chunk: int, delta: bool) -> list[_Part]:
    """Cut the tokens of all segments into those of each."""
    lengths = [len(tokens) for tokens, _ in segments]
    of_segments = zip(segments, zip(*(each.split(lengths) for each in inputs), strict=True), strict=True)
    return [_Part(segment, own, chunk, delta) for segment, own in of_segments]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]

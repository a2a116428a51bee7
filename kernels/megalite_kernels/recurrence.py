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

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite_kernels.chunks import Chunks, Segment
from megalite_kernels.launch import chunk_elements
from megalite_kernels.recurrence_block import Backward, Block, Inputs, prepare

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
        state: the state that enters the first segment, without a gradient; None for zeros.
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
        blocks: the blocks, as ranges of chunks.
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

    def new_states(self) -> Tensor:
        """Return memory for the state before each chunk, [chunks, batch * heads, key width, value width]."""
        _, batch, heads, width = self.inputs.value.shape
        shape = self.chunks.count, batch * heads, self.inputs.key.shape[3], width
        return self.inputs.value.new_empty(shape, dtype=self.wide)

    def prepare(self, block: range) -> Block:
        """Compute what of these chunks does not depend on states."""
        inputs = Inputs(*(self.chunks.split(each, block, self.wide) for each in self.inputs))
        return prepare(inputs, self.chunks.documents(block), self.inputs.value.shape[1], self._delta)

    def turn(self, block: range, states: Tensor, grad_output: Tensor) -> Backward:
        """Prepare the way back through these chunks, from all states and the gradients of all outputs."""
        prepared = self.prepare(block)
        prepared.complete(states[block.start : block.stop])
        return Backward(prepared, self.chunks.split(grad_output, block, self.wide))


def _parts(segments: Sequence[Segment], inputs: Sequence[Tensor], chunk: int, delta: bool) -> list[_Part]:
    """Cut the tokens of all segments into those of each."""
    lengths = [len(tokens) for tokens, _ in segments]
    of_segments = zip(segments, zip(*(each.split(lengths) for each in inputs), strict=True), strict=True)
    return [_Part(segment, own, chunk, delta) for segment, own in of_segments]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


class _Recurrence(torch.autograd.Function):
    """Recurrence that saves its inputs and the state before each chunk.

    A segment's map is known when all of its blocks are prepared. Those of a scan are kept until then.
    """

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
        states = [part.new_states() for part in parts]
        last = torch.zeros_like(states[0][0]) if state is None else state.to(states[0].dtype).flatten(0, 1)
        prepared: list[Iterable[Block]] = [map(part.prepare, part.blocks) for part in parts]
        entering, matrices = [last], []
        if scan is not None:
            prepared = [list(blocks) for blocks in prepared]
            maps = [_map(blocks, like=last, heads=heads) for blocks in prepared]
            entering, matrices = [each.flatten(0, 1) for each in scan.entering(maps, delta)], [m for m, _ in maps]
        outputs = []
        for i, (part, own) in enumerate(zip(parts, states, strict=True)):
            last = entering[i] if i < len(entering) else last
            output = torch.empty_like(part.inputs.value, memory_format=torch.contiguous_format)
            for block, chosen in zip(prepared[i], part.blocks, strict=True):
                before = own[chosen.start : chosen.stop]
                last = block.run(before, last)
                part.chunks.join(output, chosen, block.output(before))
            outputs.append(part.chunks.cut(output))
        last = last.unflatten(0, heads)
        ctx.save_for_backward(*inputs, *states, *matrices)
        ctx.segments, ctx.chunk, ctx.delta, ctx.scan = segments, chunk, delta, scan
        ctx.mark_non_differentiable(last)
        return _joined(outputs), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        inputs, rest = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        parts = _parts(ctx.segments, inputs, ctx.chunk, ctx.delta)
        states, matrices = rest[: len(parts)], rest[len(parts) :]
        incoming = grad_output.split([len(tokens) for tokens, _ in ctx.segments])
        turned: list[Iterable[Backward]] = [
            map(partial(part.turn, states=own, grad_output=part.chunks.pad(gradient)), reversed(part.blocks))
            for part, own, gradient in zip(parts, states, incoming, strict=True)
        ]
        gradient = torch.zeros_like(states[0][0])
        leaving = [gradient] * len(parts)
        if ctx.scan is not None:
            turned = [list(ways) for ways in turned]
            heads = inputs[2].shape[1:3]
            offsets = [_offset(ways, gradient).unflatten(0, heads) for ways in turned]
            maps = list(zip(matrices, offsets, strict=True))
            leaving = [each.flatten(0, 1) for each in ctx.scan.leaving(maps, ctx.delta)]
        found: list[list[Tensor]] = []
        for part, own, ways, given in reversed(list(zip(parts, states, turned, leaving, strict=True))):
            gradient = gradient if ctx.scan is None else given
            grads = Inputs(*(torch.empty_like(each, memory_format=torch.contiguous_format) for each in part.inputs))
            for way, chosen in zip(ways, reversed(part.blocks), strict=True):
                before = own[chosen.start : chosen.stop]
                after = torch.empty_like(before)
                gradient = way.run(gradient, after)
                for target, of_chunks in zip(grads, way.gradients(before, after), strict=True):
                    part.chunks.join(target, chosen, of_chunks)
            found.insert(0, [part.chunks.cut(each) for each in grads])
        return *(_joined(of_parts) for of_parts in zip(*found, strict=True)), *[None] * 5


def _map(blocks: Iterable[Block], like: Tensor, heads: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the map of a segment, [batch, heads, ...]: see `advance`. `like` is a state."""
    first = next(iter(blocks))
    matrix = torch.ones_like(first.keep[0])
    if first.reads is not None:
        matrix = matrix * torch.eye(like.shape[1], dtype=like.dtype, device=like.device)
    offset = torch.zeros_like(like)
    for block in blocks:
        matrix, offset = block.follow(matrix, offset)
    return matrix.unflatten(0, heads), offset.unflatten(0, heads)


def _offset(ways: Iterable[Backward], gradient: Tensor) -> Tensor:
    """Return the gradient of the state before a segment, if that of the state after it is zero."""
    for way in ways:
        gradient = way.run(gradient, None)
    return gradient

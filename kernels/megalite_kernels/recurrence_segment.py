"""A segment of a recurrence: all of its chunks, from the state before it or from its map. See `recurrence.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite_kernels.channel_decay import prepare as prepare_by_channel
from megalite_kernels.chunks import Chunks, Segment
from megalite_kernels.launch import chunk_elements
from megalite_kernels.recurrence_block import Block, Inputs, go_back, prepare

WIDEST = 128
"""Widest keys of which a program of a kernel can hold the matrices."""


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


class Part:
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
        documents, batch = self.chunks.documents(block), self.inputs.value.shape[1]
        if self.inputs.decay.dim() == 4:
            return prepare_by_channel(inputs, documents, batch)
        return prepare(inputs, documents, batch, self._delta)

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
            reach: see `FromZero`; of no tokens, if nobody asks for that gradient.
        """
        return reach.mT @ grad_output[: reach.shape[1]].flatten(1, 2).transpose(0, 1).to(self.wide)

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


class FromZero:
    """A segment as if no state entered it, until `enter`.

    What a state adds is linear: matrix @ state to the state before each chunk, and `reach` @ state to the outputs. So
    the gradient of the state before the segment needs no way back through it.

    Attributes:
        map: matrix and offset of `advance`, without a dimension of samples.
        reach: [heads, padded tokens, key width], so that one product serves all chunks.
    """

    def __init__(self, part: Part, states: Tensor) -> None:
        width, key_width = part.inputs.value.shape[3], part.inputs.key.shape[3]
        self._part, self._states, self._matrices = part, states, []
        (count, heads), tokens = states.shape[:2], len(part.inputs.value)
        self._output, self.reach = (states.new_empty(heads, tokens, each) for each in (width, key_width))
        output, reach = (each.unflatten(1, (count, -1)).transpose(0, 1) for each in (self._output, self.reach))
        state, matrix = torch.zeros_like(states[0]), None
        for own in part.blocks:
            block = part.prepare(own)
            state = block.run(states[own], state)
            matrices, matrix = block.matrices(matrix)
            output[own] = block.output(states[own])
            reach[own] = block.reach(matrices)
            self._matrices.append(matrices)
        assert matrix is not None
        self.map = matrix, state

    def enter(self, state: Tensor) -> Tensor:
        """Let a state enter, and return the outputs."""
        part = self._part
        for own, matrices in zip(part.blocks, self._matrices, strict=True):
            self._states[own] = advance(matrices, self._states[own], state)
        output = self._output.baddbmm_(self.reach, state).transpose(0, 1).to(part.inputs.value.dtype)
        return part.chunks.cut(output.reshape(part.inputs.value.shape))


class First:
    """The first segment of all, which no state enters: `FromZero` without a matrix and a reach, which nobody needs."""

    def __init__(self, part: Part, states: Tensor, delta: bool) -> None:
        self._output, state = part.run(states, torch.zeros_like(states[0]))
        heads, width, _ = state.shape
        size = width if delta else 1
        self.map = state.new_zeros(heads, size, size), state
        self.reach = state.new_empty(heads, 0, width)

    def enter(self, _: Tensor) -> Tensor:
        return self._output

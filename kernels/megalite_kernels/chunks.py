"""Chunks of tokens for recurrences. They lie on a grid that counts from the start of the sample, never of a segment.

A segment that begins or ends inside a chunk is padded with zeros to whole chunks, so that sums have one order wherever
a sample is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """Consecutive tokens of a sample.

    Attributes:
        tokens: their indices in the sample.
        first: for each token, index in the sample of the first token of its document, [batch, tokens] int64; None if
            the sample is one document.
    """

    tokens: range
    first: Tensor | None


class Documents(NamedTuple):
    """Relations of tokens and states within each chunk. Bool tensors, [chunks, batch, 1, ...].

    Attributes:
        apart: true for two tokens of different documents, [..., chunk, chunk].
        inside: true for a token whose document begins in the chunk, which sees no state from before, [..., chunk].
        ended: true for a token whose document ends in the chunk, before the last token, [..., chunk].
        last_inside: `inside` of the last token, [..., 1].
    """

    apart: Tensor
    inside: Tensor
    ended: Tensor
    last_inside: Tensor


class Chunks:
    """The chunks of a segment.

    Attributes:
        size: tokens in a chunk.
        count: number of chunks.
        start: index in the sample of the segment's first token.
        begin: that of the first chunk's first token.
    """

    def __init__(self, segment: Segment, size: int) -> None:
        tokens = segment.tokens
        self.size = size
        self._segment = segment
        self._pads = tokens.start % size, -tokens.stop % size
        self.start, self.begin = tokens.start, tokens.start - self._pads[0]
        self.count = (len(tokens) + sum(self._pads)) // size

    def pad(self, input: Tensor) -> Tensor:
        """Add zeros to the segment's tokens [tokens, ...] before and after them, so that they are whole chunks."""
        if not any(self._pads):
            return input
        before, after = (input.new_zeros(count, *input.shape[1:]) for count in self._pads)
        return torch.cat([before, input, after])

    def cut(self, padded: Tensor) -> Tensor:
        """Take away what `pad` added."""
        return padded[self._pads[0] : len(padded) - self._pads[1]]

    def blocks(self, most: int) -> Iterator[slice]:
        """Go through the chunks in blocks of at most so many."""
        for start in range(0, self.count, most):
            yield slice(start, min(start + most, self.count))

    def first(self) -> Tensor | None:
        """Return `Segment.first` of whole chunks; what is added is of the documents beside it."""
        first = self._segment.first
        if first is None or not any(self._pads):
            return first
        before, after = self._pads
        return torch.cat([first[:, :1].expand(-1, before), first, first[:, -1:].expand(-1, after)], dim=1)

    def documents(self, block: slice) -> Documents | None:
        """Return the relations of tokens and states of some chunks. None: the sample is one document.

        What stands before the segment's first token in its chunk counts as of the document of this token, and is not
        the document's begin: a state enters the segment, not the chunk.
        """
        padded = self.first()
        if padded is None:
            return None
        chosen = padded[:, block.start * self.size : block.stop * self.size]
        of_chunk = chosen.unflatten(1, (-1, self.size)).transpose(0, 1).unsqueeze(2)
        starts = [max(self.start, self.begin + i * self.size) for i in range(block.start, block.stop)]
        inside = of_chunk >= torch.tensor(starts, device=of_chunk.device).view(-1, 1, 1, 1)
        return Documents(
            apart=of_chunk.unsqueeze(-1) != of_chunk.unsqueeze(-2),
            inside=inside,
            ended=of_chunk != of_chunk[..., -1:],
            last_inside=inside[..., -1:],
        )

    def split(self, padded: Tensor, block: slice, dtype: torch.dtype) -> Tensor:
        """Take some chunks of padded tokens [tokens, batch, heads, ...], as [chunks, batch * heads, chunk, ...]."""
        parts = padded[block.start * self.size : block.stop * self.size].unflatten(0, (-1, self.size))
        return parts.movedim(1, 3).to(dtype).contiguous().flatten(1, 2)

    def join(self, target: Tensor, block: slice, parts: Tensor) -> None:
        """Write what `split` took to its place among padded tokens."""
        tokens = target[block.start * self.size : block.stop * self.size].unflatten(0, (-1, self.size))
        tokens.copy_(parts.unflatten(1, target.shape[1:3]).movedim(3, 1))

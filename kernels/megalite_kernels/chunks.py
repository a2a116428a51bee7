"""Chunks of tokens for recurrences. They lie on a grid that counts from the start of the sample, never of a segment.

A segment that begins or ends inside a chunk is padded with zeros to whole chunks, so that sums have one order wherever
a sample is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
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
        enters: true for a token that sees the state before the chunk, [..., chunk].
        leaves: true for a token of the last token's document, [..., chunk].
        survives: true if the state before the chunk is part of the one after it, [...].
    """

    apart: Tensor
    enters: Tensor
    leaves: Tensor
    survives: Tensor


class Chunks:
    """The chunks of segments, one segment after another.

    Attributes:
        size: tokens in a chunk.
        of_segment: for each segment, the indices of its chunks.
    """

    def __init__(self, segments: Sequence[Segment], size: int) -> None:
        self.size = size
        self.of_segment: list[range] = []
        self._segments = segments
        count = 0
        for segment in segments:
            chunks = -(-segment.tokens.stop // size) - segment.tokens.start // size
            self.of_segment.append(range(count, count + chunks))
            count += chunks
        self.count = count

    @cached_property
    def _is_aligned(self) -> bool:
        return all(tokens.start % self.size == 0 and tokens.stop % self.size == 0 for tokens, _ in self._segments)

    def split(self, input: Tensor, dtype: torch.dtype) -> Tensor:
        """Arrange [tokens, batch, heads, ...] as [chunks, batch * heads, chunk, ...] in this dtype."""
        if not self._is_aligned:
            input = self._padded(input)
        parts = input.unflatten(0, (self.count, self.size)).movedim(1, 3)
        return parts.to(dtype).contiguous().flatten(1, 2)

    def join(self, parts: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
        """Arrange as tokens, in this dtype, what `split` arranged as chunks."""
        tokens = parts.unflatten(1, (batch, -1)).movedim(3, 1).to(dtype).contiguous().flatten(0, 1)
        if self._is_aligned:
            return tokens
        return torch.cat([tokens[place : place + len(segment.tokens)] for place, segment in self._places()])

    def _padded(self, input: Tensor) -> Tensor:
        padded = input.new_zeros(self.count * self.size, *input.shape[1:])
        taken = 0
        for place, (tokens, _) in self._places():
            padded[place : place + len(tokens)] = input[taken : taken + len(tokens)]
            taken += len(tokens)
        return padded

    def _places(self) -> list[tuple[int, Segment]]:
        """Return each segment with the place of its first token among the padded tokens."""
        return [
            (chunks.start * self.size + segment.tokens.start % self.size, segment)
            for chunks, segment in zip(self.of_segment, self._segments, strict=True)
        ]

    def documents(self) -> Documents | None:
        """Return the relations of tokens and states. None: no document ends in these segments' sample."""
        known = [first for _, first in self._segments if first is not None]
        if not known:
            return None
        padded, starts = [], []
        for chunks, (tokens, first) in zip(self.of_segment, self._segments, strict=True):
            if first is None:
                first = known[0].new_zeros(len(known[0]), len(tokens))
            before, after = tokens.start % self.size, -tokens.stop % self.size
            padded += [first[:, :1].expand(-1, before), first, first[:, -1:].expand(-1, after)]
            starts += [max(tokens.start, (tokens.start // self.size + i) * self.size) for i in range(len(chunks))]
        of_chunk = torch.cat(padded, dim=1).unflatten(1, (self.count, self.size)).transpose(0, 1).unsqueeze(2)
        start = torch.tensor(starts, device=of_chunk.device).view(-1, 1, 1, 1)
        last = of_chunk[..., -1:]
        return Documents(
            apart=of_chunk.unsqueeze(-1) != of_chunk.unsqueeze(-2),
            enters=of_chunk < start,
            leaves=of_chunk == last,
            survives=(last < start).squeeze(-1),
        )

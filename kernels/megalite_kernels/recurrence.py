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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite_kernels.chunks import Segment
from megalite_kernels.implementation import current
from megalite_kernels.recurrence_segment import WIDEST, First, FromZero, Part, advance, retreat

__all__ = ["Chain", "Found", "Kept", "Scan", "Segment", "advance", "recurrence", "retreat", "step_once"]


CHUNKS = (16, 32, 64)
"""Tokens in a chunk of which a program of a kernel can hold the matrices."""


class Scan(Protocol):
    """Contribution of the other ranks, which have the other segments of the samples."""

    def entering(self, maps: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return the state that enters each own segment, from each one's map: see `advance`."""

    def leaving(self, maps: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return the gradient of the state that leaves each own segment, from each one's adjoint: see `retreat`."""


Run = Callable[[Tensor], Tensor]
"""Computation of a segment: from the state that enters it to the one that leaves it, or the same of gradients."""


class Chain:
    """Passing of states from segment to segment. Other ranks may have some of them."""

    def run(self, runs: Sequence[Run], first: Tensor, *, backward: bool = False) -> Tensor:
        """Compute own segments in turn, or in backward from the last one, and return what leaves the last of these.

        `first`: what enters the first segment of the samples, or in backward the last one.
        """
        for run in reversed(runs) if backward else runs:
            first = run(first)
        return first


_ALONE = Chain()


class Found(NamedTuple):
    """Output of a recurrence, the state after all chunks, and what backward needs besides the inputs."""

    output: Tensor
    last: Tensor
    saved: Sequence[Tensor]


@dataclass
class Kept:
    """Place for the results of a recurrence, so that another call with the same inputs takes them from there."""

    found: Found | None = None

    def take(self) -> Found:
        """Return the results, which are no longer here."""
        assert self.found is not None
        found, self.found = self.found, None
        return found


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
    chain: Chain = _ALONE,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence over the tokens of all segments, one segment after another.

    Args:
        query, key: [tokens, batch, key heads, key width]. Consecutive heads share a key head.
        value: [tokens, batch, heads, value width].
        decay: logarithm of the factor of the state, <= 0, [tokens, batch, heads], in fp32 or wider. With the delta rule
            and as many key heads as heads, also of each of its rows, [tokens, batch, heads, key width].
        step: [tokens, batch, heads], in fp32 or wider.
        delta: take the delta rule.
        chunk: tokens in a chunk; with a decay of each row a power of two.
        segments: the tokens' places in the samples; None for the indices 0, 1, 2, ... of samples of one document.
        state: the state that enters the first segment, without a gradient; None for zeros. Not with a scan.
        scan: composition of the maps of all ranks' segments, none of which then waits for another; None: `chain` passes
            states on.
        chain: by default, each segment continues the one before it.
        kept: where the results are left, or taken from by another call with the same arguments.

    Returns:
        The output [tokens, batch, heads, value width] in the dtype of `value`, and the state after the last segment
        [batch, heads, key width, value width], which has no gradient.
    """
    segments = [Segment(range(len(query)), None)] if segments is None else segments
    output, last = _Recurrence.apply(query, key, value, decay, step, state, segments, chunk, delta, scan, chain, kept)
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
    kept = decay[0].to(state.dtype).exp().unsqueeze(-1)
    state = state * (kept if decay.dim() == 4 else kept.unsqueeze(-1))
    if delta:
        added = added - wide_key @ state
    state = state + wide_key.mT * (added * step[0].to(state.dtype)[..., None, None])
    return (wide_query @ state).squeeze(2).unsqueeze(0).to(value.dtype), state


def _forward(
    inputs: Sequence[Tensor],
    state: Tensor | None,
    segments: Sequence[Segment],
    chunk: int,
    delta: bool,
    scan: Scan | None,
    chain: Chain,
) -> Found:
    """Compute the segments one after another, or with a scan all from zero before the first state enters."""
    _, key, value, _, _ = inputs
    parts, heads = _parts_of(segments, inputs, chunk, delta), value.shape[1:3]
    states = [part.new(key.shape[3], value.shape[3]) for part in parts]
    last = torch.zeros_like(states[0][0]) if state is None else state.to(states[0].dtype).flatten(0, 1)
    outputs, of_maps = [], []
    if scan is None:

        def run(part: Part, own: Tensor, entering: Tensor) -> Tensor:
            output, leaving = part.run(own, entering)
            outputs.append(output)
            return leaving

        last = chain.run([partial(run, part, own) for part, own in zip(parts, states, strict=True)], last)
    else:
        runs = [
            FromZero(part, own) if part.chunks.start else First(part, own, delta)
            for part, own in zip(parts, states, strict=True)
        ]
        maps = [(run.map[0].unflatten(0, heads), run.map[1].unflatten(0, heads)) for run in runs]
        entering = [each.flatten(0, 1) for each in scan.entering(maps)]
        outputs = [run.enter(each) for run, each in zip(runs, entering, strict=True)]
        last = advance(*runs[-1].map, entering[-1])
        of_maps = [*(matrix for matrix, _ in maps), *(run.reach for run in runs)]
    return Found(_joined(outputs), last.unflatten(0, heads), [*states, *of_maps])


class _Recurrence(torch.autograd.Function):
    """Recurrence that saves its inputs and the state before each chunk; with a scan also the reach of a state."""

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
        chain: Chain,
        kept: Kept | None,
    ) -> tuple[Tensor, Tensor]:
        """Run the recurrence, or take what is kept of it."""
        inputs = query, key, value, decay, step
        if kept is not None and kept.found is not None:
            found = kept.take()
        else:
            found = _forward(inputs, state, segments, chunk, delta, scan, chain)
            if kept is not None:
                kept.found = found
        ctx.save_for_backward(*inputs, *found.saved)
        ctx.segments, ctx.chunk, ctx.delta, ctx.scan, ctx.chain = segments, chunk, delta, scan, chain
        ctx.mark_non_differentiable(found.last)
        return found.output, found.last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Go back through the segments, from the last one to the first."""
        saved = ctx.saved_tensors  # a layer that is computed again unpacks them no second time
        inputs, rest = saved[:5], saved[5:]
        parts, heads = _parts_of(ctx.segments, inputs, ctx.chunk, ctx.delta), inputs[2].shape[1:3]
        count = len(parts)
        states, matrices, reaches = rest[:count], rest[count : 2 * count], rest[2 * count :]
        incoming = [
            part.chunks.pad(own)
            for part, own in zip(parts, grad_output.split([len(tokens) for tokens, _ in ctx.segments]), strict=True)
        ]
        found: list[list[Tensor]] = [[]] * count

        def back(number: int, leaving: Tensor) -> Tensor:
            found[number], entering = parts[number].back(states[number], incoming[number], leaving)
            return entering

        if ctx.scan is None:
            runs = [partial(back, number) for number in range(count)]
            ctx.chain.run(runs, torch.zeros_like(states[0][0]), backward=True)
        else:
            of_parts = zip(parts, reaches, incoming, strict=True)
            offsets = [part.reached(reach, own).unflatten(0, heads) for part, reach, own in of_parts]
            for number, each in enumerate(ctx.scan.leaving(list(zip(matrices, offsets, strict=True)))):
                back(number, each.flatten(0, 1))
        return *(_joined(of_parts) for of_parts in zip(*found, strict=True)), *[None] * 7


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


def _parts_of(segments: Sequence[Segment], inputs: Sequence[Tensor], chunk: int, delta: bool) -> list[Part]:
    """Cut the tokens of all segments into those of each."""
    kind = Part
    if _have_kernels(inputs, chunk):
        chunk = min(chunk, CHUNKS[-1])
        from megalite_kernels.recurrence_kernels import KernelPart as kind
    lengths = [len(tokens) for tokens, _ in segments]
    of_segments = zip(segments, zip(*(each.split(lengths) for each in inputs), strict=True), strict=True)
    return [kind(segment, own, chunk, delta) for segment, own in of_segments]


def _have_kernels(inputs: Sequence[Tensor], chunk: int) -> bool:
    """Tell whether there are kernels for these inputs, and whether they run here."""
    query, key, value, decay, step = inputs
    return (
        current().runs_triton("recurrence", *inputs)
        and query.dtype == key.dtype == value.dtype != torch.float32 == decay.dtype == step.dtype
        and decay.dim() == 3
        and min(chunk, CHUNKS[-1]) in CHUNKS
        and chunk % min(chunk, CHUNKS[-1]) == 0
        and key.shape[3] <= WIDEST
    )

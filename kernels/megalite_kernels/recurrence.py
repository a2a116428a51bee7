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
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite_kernels.chunks import Chunks, Documents, Segment

__all__ = ["Kept", "Scan", "Segment", "advance", "recurrence", "retreat", "step_once"]


class Scan(Protocol):
    """What other ranks, with the other segments of the samples, contribute."""

    def entering(self, maps: Sequence[tuple[Tensor, Tensor]], delta: bool) -> list[Tensor]:
        """Return the state that enters each own segment, from each one's map: see `advance`."""

    def leaving(self, maps: Sequence[tuple[Tensor, Tensor]], delta: bool) -> list[Tensor]:
        """Return the gradient of the state that leaves each own segment, from each one's adjoint: see `retreat`."""


class _Found(NamedTuple):
    """Output of a recurrence, the state before each chunk and after all, and the matrices of the segments' maps."""

    output: Tensor
    states: Tensor
    last: Tensor
    matrices: list[Tensor]


@dataclass
class Kept:
    """Results of a recurrence, so that it is not computed again where what stands around it is."""

    found: _Found | None = None


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
    kept: Kept | None = None,
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
        kept: where the results are left, or taken from by another call with the same arguments.

    Returns:
        The output [tokens, batch, heads, value width] in the dtype of `value`, and the state after the last segment
        [batch, heads, key width, value width], which has no gradient.
    """
    chunks = Chunks([Segment(range(len(query)), None)] if segments is None else segments, chunk)
    output, last = _Recurrence.apply(query, key, value, decay, step, state, chunks, delta, scan, kept)
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


@dataclass
class _Prepared:
    """What of the chunks does not depend on states. Heads of all samples stand one after another.

    Attributes:
        query, key: [chunks, heads, chunk, key width].
        value: [chunks, heads, chunk, value width].
        step: [chunks, heads, chunk].
        pairs: L, [chunks, heads, chunk, chunk].
        inflow: factor of the entering state for each token, [chunks, heads, chunk].
        outflow: factor of what each token adds in the leaving state, [chunks, heads, chunk].
        keep: factor of the entering state in the leaving one, [chunks, heads].
        scores: query key^T * L, [chunks, heads, chunk, chunk].
        system: of the delta rule, step * key key^T * L; only what lies below the diagonal counts.
        added: what tokens add to the state if no state enters, [chunks, heads, chunk, value width].
        reads: of the delta rule, what must be subtracted from it for an entering state, [chunks, heads, chunk, key
            width], to be multiplied with the state.
        gains: e^(c_last - c) * key, [chunks, heads, chunk, key width].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    step: Tensor
    pairs: Tensor
    inflow: Tensor
    outflow: Tensor
    keep: Tensor
    scores: Tensor
    system: Tensor | None
    added: Tensor
    reads: Tensor | None
    gains: Tensor


def _prepare(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, step: Tensor, chunks: Chunks, delta: bool
) -> _Prepared:
    """Compute all that does not depend on states. Inputs are those of `recurrence`."""
    wide = torch.promote_types(decay.dtype, torch.float32)
    batch, shared = query.shape[1], value.shape[2] // key.shape[2]
    query, key, value, decay, step = (chunks.split(each, wide) for each in (query, key, value, decay, step))
    total = decay.cumsum(dim=-1)
    pairs, inflow, outflow, keep = _factors(total, chunks.documents(), batch)
    scores = _for_heads(query @ key.mT, shared) * pairs
    products = _for_heads(key @ key.mT, shared) if delta else None
    query, key = _for_heads(query, shared), _for_heads(key, shared)
    added, reads, system = value * step.unsqueeze(-1), None, None
    if products is not None:
        system = products * pairs * step.unsqueeze(-1)
        right = torch.cat([added, key * (step * inflow).unsqueeze(-1)], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        added, reads = (each.contiguous() for each in solved.split([value.shape[-1], key.shape[-1]], dim=-1))
    gains = key * outflow.unsqueeze(-1)
    return _Prepared(query, key, value, step, pairs, inflow, outflow, keep, scores, system, added, reads, gains)


def _factors(total: Tensor, documents: Documents | None, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `pairs`, `inflow`, `outflow` and `keep` of `_Prepared` from the cumulative sum of the decay.

    What is not seen is masked before the exponential: there it could overflow.
    """
    size, last = total.shape[-1], total[..., -1:]
    differences = total.unsqueeze(-1) - total.unsqueeze(-2)
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    inflow, outflow, keep = total.clone(), last - total, last.squeeze(-1).clone()
    if documents is not None:
        later = later | documents.apart
        inflow.unflatten(1, (batch, -1)).masked_fill_(~documents.enters, -torch.inf)
        outflow.unflatten(1, (batch, -1)).masked_fill_(~documents.leaves, -torch.inf)
        keep.unflatten(1, (batch, -1)).masked_fill_(~documents.survives, -torch.inf)
    differences.unflatten(1, (batch, -1)).masked_fill_(later, -torch.inf)
    return differences.exp_(), inflow.exp_(), outflow.exp_(), keep.exp_()


def _for_heads(of_key_heads: Tensor, shared: int) -> Tensor:
    """Repeat each key head for the heads that share it: [chunks, key heads, ...] to [chunks, heads, ...]."""
    return of_key_heads if shared == 1 else of_key_heads.repeat_interleave(shared, dim=1)


def _of_key_heads(of_heads: Tensor, shared: int) -> Tensor:
    """Add up over the heads that share a key head: the adjoint of `_for_heads`."""
    return of_heads if shared == 1 else of_heads.unflatten(1, (-1, shared)).sum(dim=2)


def _run(prepared: _Prepared, states: Tensor, chunks: range, state: Tensor) -> Tensor:
    """Write the state that enters each of these chunks into `states`, and complete `added`. Return the last state."""
    keep = prepared.keep[..., None, None]
    for i in chunks:
        states[i] = state
        if prepared.reads is not None:
            prepared.added[i].baddbmm_(prepared.reads[i], state, alpha=-1)
        state = torch.baddbmm(keep[i] * state, prepared.gains[i].mT, prepared.added[i])
    return state


def _map(prepared: _Prepared, chunks: range) -> tuple[Tensor, Tensor]:
    """Return matrix and offset of the map of these chunks, [heads, ...]: see `advance`."""
    keep, width = prepared.keep[..., None, None], prepared.key.shape[-1]
    heads, one = len(keep[0]), torch.ones_like(keep[0])
    matrix = one if prepared.reads is None else one * torch.eye(width, dtype=one.dtype, device=one.device)
    offset = one.new_zeros(heads, width, prepared.value.shape[-1])
    for i in chunks:
        gains, added = prepared.gains[i].mT, prepared.added[i]
        if prepared.reads is None:
            matrix = keep[i] * matrix
        else:
            added = torch.baddbmm(added, prepared.reads[i], offset, alpha=-1)
            matrix = torch.baddbmm(keep[i] * matrix, gains, prepared.reads[i] @ matrix, alpha=-1)
        offset = torch.baddbmm(keep[i] * offset, gains, added)
    return matrix, offset


def _forward(
    prepared: _Prepared, value: Tensor, state: Tensor | None, chunks: Chunks, delta: bool, scan: Scan | None
) -> _Found:
    """Run the recurrence of `_Recurrence`."""
    heads = value.shape[1:3]
    states = prepared.keep.new_empty(*prepared.keep.shape, prepared.key.shape[-1], value.shape[3])
    last = states.new_zeros(*heads, *states.shape[2:]) if state is None else state.to(states.dtype)
    entering, matrices = [last], []
    if scan is not None:
        maps = [tuple(each.unflatten(0, heads) for each in _map(prepared, run)) for run in chunks.of_segment]
        entering, matrices = scan.entering(maps, delta), [matrix for matrix, _ in maps]
    for i, run in enumerate(chunks.of_segment):
        if i < len(entering):
            last = entering[i]
        last = _run(prepared, states, run, last.flatten(0, 1)).unflatten(0, heads)
    output = (prepared.query @ states) * prepared.inflow.unsqueeze(-1) + prepared.scores @ prepared.added
    return _Found(chunks.join(output, heads[0], value.dtype), states, last, matrices)


class _Recurrence(torch.autograd.Function):
    """Recurrence in chunks, which saves its inputs and the state before each chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        step: Tensor,
        state: Tensor | None,
        chunks: Chunks,
        delta: bool,
        scan: Scan | None,
        kept: Kept | None,
    ) -> tuple[Tensor, Tensor]:
        found = None if kept is None else kept.found
        if found is None:
            found = _forward(_prepare(query, key, value, decay, step, chunks, delta), value, state, chunks, delta, scan)
            if kept is not None:
                kept.found = found
        ctx.save_for_backward(query, key, value, decay, step, found.states, *found.matrices)
        ctx.chunks, ctx.delta, ctx.scan = chunks, delta, scan
        ctx.mark_non_differentiable(found.last)
        return found.output, found.last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, decay, step, states, *matrices = ctx.saved_tensors
        chunks, shared = ctx.chunks, value.shape[2] // key.shape[2]
        prepared = _prepare(query, key, value, decay, step, chunks, ctx.delta)
        if prepared.reads is not None:
            prepared.added.sub_(prepared.reads @ states)
        gradient = chunks.split(grad_output, states.dtype)
        grad_added = prepared.scores.mT @ gradient
        grad_states = (prepared.query * prepared.inflow.unsqueeze(-1)).mT @ gradient
        leaving = _leaving(prepared, grad_added, grad_states, matrices, ctx, value.shape[1:3])
        found = _gradients(prepared, states, gradient, grad_added, leaving, shared)
        inputs = (query, key, value, decay, step)
        return *(chunks.join(one, query.shape[1], of.dtype) for one, of in zip(found, inputs, strict=True)), *[None] * 5


def _leaving(
    prepared: _Prepared, grad_added: Tensor, grad_states: Tensor, matrices: list[Tensor], ctx: Any, heads: torch.Size
) -> Tensor:
    """Return the gradient of the state after each chunk, [chunks, heads, ...], and complete `grad_added`.

    Args:
        grad_added: gradient of `added` without what comes from later chunks.
        grad_states: gradient of the state before each chunk, likewise.
        matrices: of the segments' maps, if there is a scan.
    """
    leaving, zero = torch.empty_like(grad_states), torch.zeros_like(grad_states[0])
    segments = ctx.chunks.of_segment
    given: list[Tensor] = []
    if ctx.scan is not None:
        offsets = [_reverse(prepared, grad_added.clone(), grad_states, leaving, run, zero) for run in segments]
        maps = [(matrix, offset.unflatten(0, heads)) for matrix, offset in zip(matrices, offsets, strict=True)]
        given = [each.flatten(0, 1) for each in ctx.scan.leaving(maps, ctx.delta)]
    current = zero
    for i, run in reversed(list(enumerate(segments))):
        current = _reverse(prepared, grad_added, grad_states, leaving, run, given[i] if given else current)
    return leaving


def _reverse(
    prepared: _Prepared, grad_added: Tensor, grad_states: Tensor, leaving: Tensor, chunks: range, gradient: Tensor
) -> Tensor:
    """Go back through chunks with the gradient of the state after them, and return that of the state before them."""
    keep = prepared.keep[..., None, None]
    for i in reversed(chunks):
        leaving[i] = gradient
        grad_added[i].baddbmm_(prepared.gains[i], gradient)
        gradient = keep[i] * gradient + grad_states[i]
        if prepared.reads is not None:
            gradient.baddbmm_(prepared.reads[i].mT, grad_added[i], alpha=-1)
    return gradient


def _gradients(
    prepared: _Prepared, states: Tensor, gradient: Tensor, grad_added: Tensor, leaving: Tensor, shared: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, decay and step, arranged as chunks.

    The gradient of each factor e^x is one of x when multiplied with the factor. All are gathered as one of c.
    """
    query, key, value, step = prepared.query, prepared.key, prepared.value, prepared.step.unsqueeze(-1)
    inflow, outflow = prepared.inflow.unsqueeze(-1), prepared.outflow.unsqueeze(-1)
    grad_scores = gradient @ prepared.added.mT
    through = grad_scores * prepared.scores
    grad_products = grad_scores * prepared.pairs
    grad_query = (gradient @ states.mT) * inflow
    grad_key = (prepared.added @ leaving.mT) * outflow
    of_outflow = (grad_key * key).sum(dim=-1)
    grad_total = (grad_query * query).sum(dim=-1) - of_outflow
    grad_last = of_outflow.sum(dim=-1) + (states * leaving).sum(dim=(-2, -1)) * prepared.keep
    grad_right, grad_step = grad_added, None
    symmetric = None
    if prepared.system is not None:
        grad_right = torch.linalg.solve_triangular(prepared.system.mT, grad_added, upper=True, unitriangular=True)
        read = (grad_right @ states.mT) * inflow
        of_read = (read * key).sum(dim=-1)
        grad_system = (grad_right @ prepared.added.mT).tril(-1).neg_()
        of_step = grad_system * prepared.pairs
        products = _for_heads(key[:, ::shared] @ key[:, ::shared].mT, shared)
        grad_step = (of_step * products).sum(dim=-1) - of_read
        through = through + grad_system * prepared.system
        symmetric = of_step * step
        grad_total = grad_total - of_read * prepared.step
        grad_key = grad_key - read * step
    of_value = (grad_right * value).sum(dim=-1)
    grad_step = of_value if grad_step is None else grad_step + of_value
    through = through.tril(-1)
    grad_total = grad_total + through.sum(dim=-1) - through.sum(dim=-2)
    grad_total[..., -1] += grad_last
    grad_decay = grad_total.flip(-1).cumsum(dim=-1).flip(-1)
    query, key = query[:, ::shared], key[:, ::shared]
    grad_products = _of_key_heads(grad_products, shared)
    grad_query = _of_key_heads(grad_query, shared) + grad_products @ key
    grad_key = _of_key_heads(grad_key, shared) + grad_products.mT @ query
    if symmetric is not None:
        symmetric = _of_key_heads(symmetric, shared)
        grad_key = grad_key + (symmetric + symmetric.mT) @ key
    return grad_query, grad_key, grad_right * step, grad_decay, grad_step

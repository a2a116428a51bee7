"""The mathematics of some consecutive chunks of a recurrence: see `megalite_kernels.recurrence`.

Heads of all samples stand one after another. Shapes begin with [chunks, heads], those of states with [heads].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular, vecdot

from megalite_kernels.chunks import Documents


class Inputs(NamedTuple):
    """Inputs, or their gradients, in one dtype.

    Attributes:
        query, key: [chunks, key heads, chunk, key width].
        value: [chunks, heads, chunk, value width].
        decay, step: [chunks, heads, chunk].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    step: Tensor


@dataclass(frozen=True)
class Block:
    """Chunks, with what of them does not depend on the state that enters.

    Attributes:
        inputs: its inputs.
        shared: how many heads share a key head.
        query, key: of each head, [..., chunk, key width].
        step: [..., chunk, 1].
        pairs: L, [..., chunk, chunk].
        inflow: factor of the entering state for each token, [..., chunk, 1].
        outflow: factor in the leaving state of what each token adds, [..., chunk, 1].
        keep: factor in the leaving state of the entering one, [..., 1, 1].
        scores: query key^T * L, [..., chunk, chunk].
        products: of the delta rule, key key^T * L.
        system: of the delta rule, step * products; only what lies below the diagonal counts.
        added: what tokens add to the state, [..., chunk, value width]; until `run`, if the entering state is zero.
        reads: of the delta rule, [..., chunk, key width]: times the entering state, it is subtracted from `added`.
        gains: outflow * key, [..., chunk, key width]: transposed, times `added`, it is what the state gains.
    """

    inputs: Inputs
    shared: int
    query: Tensor
    key: Tensor
    step: Tensor
    pairs: Tensor
    inflow: Tensor
    outflow: Tensor
    keep: Tensor
    scores: Tensor
    products: Tensor | None
    system: Tensor | None
    added: Tensor
    reads: Tensor | None
    gains: Tensor

    def run(self, states: Tensor, state: Tensor) -> Tensor:
        """Write the state before each chunk into `states`, complete `added`, and return the state after the last."""
        for i in range(len(states)):
            states[i] = state
            if self.reads is not None:
                self.added[i].baddbmm_(self.reads[i], state, alpha=-1)
            state = torch.baddbmm(self.keep[i] * state, self.gains[i].mT, self.added[i])
        return state

    def output(self, states: Tensor) -> Tensor:
        """Return the outputs, [..., chunk, value width], once `added` is complete."""
        return (self.scores @ self.added).addcmul_(self.query @ states, self.inflow)

    def matrices(self, matrix: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what a state before the segment is multiplied with in the states before each chunk and after the last.

        Args:
            matrix: that of the state before the first chunk; None if the segment begins there.

        Returns:
            [..., key width, key width] and the same of the last. Without the delta rule they are numbers, [..., 1, 1].
        """
        found, keep = [], self.keep
        if matrix is None:
            matrix = torch.ones_like(keep[0])
            if self.reads is not None:
                matrix = matrix * torch.eye(self.key.shape[-1], dtype=keep.dtype, device=keep.device)
        for i in range(len(keep)):
            found.append(matrix)
            if self.reads is None:
                matrix = keep[i] * matrix
            else:
                matrix = torch.baddbmm(keep[i] * matrix, self.gains[i].mT, self.reads[i] @ matrix, alpha=-1)
        return torch.stack(found), matrix

    def reach(self, matrices: Tensor) -> Tensor:
        """Return what a state before the segment is multiplied with in the outputs, [..., chunk, key width].

        Args:
            matrices: see `matrices`.
        """
        seen = self.query * self.inflow
        return seen * matrices if self.reads is None else (seen - self.scores @ self.reads) @ matrices

    def gradients(self, states: Tensor, grad_output: Tensor, grad_added: Tensor, leaving: Tensor) -> Inputs:
        """Compute the gradients of the inputs, with `added` complete and the gradient of the state after each chunk.

        The gradient of a factor e^x times the factor is one of x. All of them are gathered as one of c, `grad_total`.
        """
        query, key, value, *_ = self.inputs
        shared, step = self.shared, self.step
        grad_scores = grad_output @ self.added.mT
        grad_pairs = grad_scores * self.scores
        grad_products = _over_heads(grad_scores.mul_(self.pairs), shared)
        grad_query = (grad_output @ states.mT).mul_(self.inflow)
        grad_key = (self.added @ leaving.mT).mul_(self.outflow)
        of_outflow = vecdot(grad_key, self.key)
        grad_total = vecdot(grad_query, self.query) - of_outflow
        grad_total[..., -1] += of_outflow.sum(dim=-1) + (states * leaving).sum(dim=(-2, -1)) * self.keep[..., 0, 0]
        if self.system is None or self.products is None:
            grad_right, grad_key = grad_added, _over_heads(grad_key, shared)
            grad_step = vecdot(grad_right, value)
        else:
            grad_right = solve_adjoint(self.system, grad_added)
            seen = (grad_right @ states.mT).mul_(self.inflow)
            of_seen = vecdot(seen, self.key)
            grad_system = (grad_right @ self.added.mT).tril_(-1).neg_()
            grad_step = vecdot(grad_right, value) - of_seen + vecdot(grad_system, self.products)
            grad_total.addcmul_(of_seen, step.squeeze(-1), value=-1)
            grad_pairs.addcmul_(grad_system, self.system)
            of_pairs = _over_heads(grad_system.mul_(self.pairs).mul_(step), shared)
            grad_key = _over_heads(grad_key.addcmul_(seen, step, value=-1), shared).add_((of_pairs + of_pairs.mT) @ key)
        grad_pairs.tril_(-1)  # on the diagonal is no decay
        grad_total += grad_pairs.sum(dim=-1) - grad_pairs.sum(dim=-2)
        return Inputs(
            query=_over_heads(grad_query, shared).add_(grad_products @ key),
            key=grad_key.add_(grad_products.mT @ query),
            value=grad_right * step,
            decay=grad_total.flip(-1).cumsum(dim=-1).flip(-1),
            step=grad_step,
        )


def prepare(inputs: Inputs, documents: Documents | None, batch: int, delta: bool) -> Block:
    """Compute all of the chunks that does not depend on states."""
    query, key, value = inputs.query, inputs.key, inputs.value
    shared, step = value.shape[1] // key.shape[1], inputs.step.unsqueeze(-1)
    pairs, inflow, outflow, keep = _factors(inputs.decay, documents, batch)
    scores = _times(query @ key.mT, pairs, shared)
    products = _times(key @ key.mT, pairs, shared) if delta else None
    query, key = (each.repeat_interleave(shared, dim=1) if shared > 1 else each for each in (query, key))
    added, reads, system = value * step, None, None
    if products is not None:
        system = products * step
        right = torch.cat([added, key * (step * inflow)], dim=-1)
        added, reads = solve(system, right).split([value.shape[-1], key.shape[-1]], dim=-1)
    gains = key * outflow
    return Block(
        inputs, shared, query, key, step, pairs, inflow, outflow, keep, scores, products, system, added, reads, gains
    )


def _factors(decay: Tensor, documents: Documents | None, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `pairs`, `inflow`, `outflow` and `keep` of a block from the decay [chunks, heads, chunk].

    Cumulative sums are in float64, and in fp32 two numbers each: the difference of two sums keeps a small decay beside
    large ones. Above the diagonal, the exponential could overflow, and of -inf it takes a processor longer than of 0.
    """
    exact = decay.double().cumsum(dim=-1)
    total = exact.to(decay.dtype)
    pairs = total.unsqueeze(-1) - total.unsqueeze(-2)
    if decay.dtype != torch.float64:
        rest = (exact - total).to(decay.dtype)
        pairs += rest.unsqueeze(-1)
        pairs -= rest.unsqueeze(-2)
    pairs = pairs.tril_().exp_().tril_()
    inflow, outflow, keep = exact.exp(), (exact[..., -1:] - exact).exp_(), exact[..., -1:].exp()
    inflow, outflow, keep = (each.to(decay.dtype) for each in (inflow, outflow, keep))
    if documents is not None:
        masks = documents.apart, documents.inside, documents.ended, documents.last_inside
        for factor, mask in zip((pairs, inflow, outflow, keep), masks, strict=True):
            factor.unflatten(1, (batch, -1)).masked_fill_(mask, 0)
    return pairs, inflow.unsqueeze(-1), outflow.unsqueeze(-1), keep.unsqueeze(-1)


def _times(of_key_heads: Tensor, of_heads: Tensor, shared: int) -> Tensor:
    """Multiply each head with its key head. Consecutive heads share a key head."""
    if shared == 1:
        return of_key_heads.mul_(of_heads)
    return (of_heads.unflatten(1, (-1, shared)) * of_key_heads.unsqueeze(2)).flatten(1, 2)


def _over_heads(of_heads: Tensor, shared: int) -> Tensor:
    """Add up over the heads that share a key head."""
    return of_heads if shared == 1 else of_heads.unflatten(1, (-1, shared)).sum(dim=2)


def solve(system: Tensor, right: Tensor) -> Tensor:
    """Return (1 + system)^-1 right of a system below the diagonal. Transposed, no operand need be copied."""
    return solve_triangular(system.mT, right.mT, upper=True, left=False, unitriangular=True).mT


def solve_adjoint(system: Tensor, right: Tensor) -> Tensor:
    """Return (1 + system)^-T right of a system below the diagonal."""
    return solve_triangular(system, right.mT, upper=False, left=False, unitriangular=True).mT


def go_back(block: Block, states: Tensor, grad_output: Tensor, gradient: Tensor) -> tuple[Inputs, Tensor]:
    """Compute the gradients of the inputs, and that of the state before the first chunk.

    Args:
        states: the state before each chunk.
        grad_output: gradient of the outputs, [..., chunk, value width].
        gradient: gradient of the state after the last chunk.
    """
    if block.reads is not None:
        block.added.sub_(block.reads @ states)
    grad_added = block.scores.mT @ grad_output
    grad_states = (block.query * block.inflow).mT @ grad_output
    leaving = torch.empty_like(states)
    for i in reversed(range(len(states))):
        leaving[i] = gradient
        grad_added[i].baddbmm_(block.gains[i], gradient)
        gradient = torch.addcmul(grad_states[i], block.keep[i], gradient)
        if block.reads is not None:
            gradient.baddbmm_(block.reads[i].mT, grad_added[i], alpha=-1)
    return block.gradients(states, grad_output, grad_added, leaving), gradient

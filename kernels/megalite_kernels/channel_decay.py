"""Chunks of the delta rule with a decay for each key channel (Kimi delta attention, arXiv:2510.26692).

As in `megalite_kernels.recurrence_block`, but c is a vector of each token, and e^(c_i - c_j) stands inside products of
queries and keys: sum over channels d of q_id k_jd e^(c_id - c_jd). For all i in the second half of some tokens and
all j in the first, these are one product of matrices, of q_i e^(the decay after the middle up to i) and k_j e^(that
after j up to the middle). Halves are halved again until a token is left. No exponent is above zero and none is a
difference: nothing overflows, and beside a large decay no small one is lost. The way back takes the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vecdot

from megalite_kernels.chunks import Documents
from megalite_kernels.recurrence_block import Block, Inputs, solve, solve_adjoint


@dataclass(frozen=True)
class ChannelBlock(Block):
    """Chunks whose decay is [chunks, heads, chunk, key width], and whose heads share no key head.

    `inflow` and `outflow` are [..., chunk, key width], and `keep` is [..., key width, 1]. `pairs` is 1 for tokens
    j <= i of one document, and else 0.

    Attributes:
        factors: for parts of 2, 4, 8, ... tokens, e^(decay) of the second half's tokens and of the first one's, [...,
            parts, half, key width].
    """

    factors: list[tuple[Tensor, Tensor]]

    def output(self, states: Tensor) -> Tensor:
        return self.scores @ self.added + (self.query * self.inflow) @ states

    def gradients(self, states: Tensor, grad_output: Tensor, grad_added: Tensor, leaving: Tensor) -> Inputs:
        """Compute the gradients of the inputs, with `added` complete and the gradient of the state after each chunk.

        The gradient of a factor e^x times the factor is one of x, which is a sum of decays within a part: `upto` each
        token, `after` it, or over the whole part.
        """
        query, key, value, *_ = self.inputs
        assert self.system is not None
        assert self.products is not None
        grad_right = solve_adjoint(self.system, grad_added)
        seen = (grad_right @ states.mT).mul_(self.inflow)
        grad_scores = (grad_output @ self.added.mT).mul_(self.pairs)
        grad_system = (grad_right @ self.added.mT).mul_(self.pairs).tril_(-1).neg_()
        grad_step = vecdot(grad_right, value) - vecdot(seen, key) + vecdot(grad_system, self.products)
        grad_products = grad_system.mul_(self.step)
        seen.mul_(self.step)
        grad_query = (grad_output @ states.mT).mul_(self.inflow)
        grad_key = (self.added @ leaving.mT).mul_(self.outflow)
        upto, after = (grad_query * query).addcmul_(seen, key, value=-1), grad_key * key
        whole = (self.keep.squeeze(-1) * (states * leaving).sum(dim=-1)).unsqueeze(-2)
        grad_key.sub_(seen)
        for half, factors in reversed(list(zip(_halves(key), self.factors, strict=True))):
            whole = whole.repeat_interleave(2, dim=-2)
            for target, source in zip(_cut(whole, 1), (_cut(upto, half)[1], _cut(after, half)[0]), strict=True):
                target.add_(source.sum(dim=-2, keepdim=True))
            corners = torch.cat([_corners(grad_scores, half), _corners(grad_products, half)], dim=-2)
            (first, second), asking = _cut(key, half), _cut(query, half)[1]
            asked = corners @ (first * factors[1])
            for source, grad, of_rows in zip(
                (asking, second), (grad_query, grad_key), asked.split(half, -2), strict=True
            ):
                of_rows = of_rows * factors[0]
                _cut(grad, half)[1].add_(of_rows)
                _cut(upto, half)[1].addcmul_(of_rows, source)
            of_first = (corners.mT @ _rows(asking, second, factors[0])).mul_(factors[1])
            _cut(grad_key, half)[0].add_(of_first)
            _cut(after, half)[0].addcmul_(of_first, first)
        own = grad_scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        return Inputs(
            query=grad_query.addcmul_(own, key),
            key=grad_key.addcmul_(own, query),
            value=grad_right * self.step,
            decay=upto.add_(whole),
            step=grad_step,
        )


def prepare(inputs: Inputs, documents: Documents | None, batch: int) -> ChannelBlock:
    """Compute all of the chunks that does not depend on states. A chunk's number of tokens is a power of two."""
    query, key, value, decay, _ = inputs
    step = inputs.step.unsqueeze(-1)
    scores, products = key.new_zeros(2, *key.shape[:-1], key.shape[-2])
    scores.diagonal(dim1=-2, dim2=-1).copy_(vecdot(query, key))
    upto, after, factors = decay.clone(), torch.zeros_like(decay), []
    for half in _halves(key):
        (first_upto, second_upto), (first_after, _) = _cut(upto, half), _cut(after, half)
        factors.append((second_upto.exp(), first_after.exp()))
        (first, second), asking = _cut(key, half), _cut(query, half)[1]
        found = _rows(asking, second, factors[-1][0]) @ (first * factors[-1][1]).mT
        for target, part in zip((scores, products), found.split(half, dim=-2), strict=True):
            _corners(target, half).copy_(part)
        first_after.add_(second_upto[..., -1:, :])
        second_upto.add_(first_upto[..., -1:, :])
    pairs = torch.ones_like(scores).tril_()
    inflow, outflow, keep = upto.exp(), after.exp_(), upto[..., -1, :].exp().unsqueeze(-1)
    if documents is not None:
        for factor in (pairs, scores, products):
            factor.unflatten(1, (batch, -1)).masked_fill_(documents.apart, 0)
        masks = documents.inside, documents.ended, documents.last_inside
        for factor, mask in zip((inflow, outflow, keep), masks, strict=True):
            factor.unflatten(1, (batch, -1)).masked_fill_(mask.unsqueeze(-1), 0)
    system = products * step
    added, reads = solve(system, torch.cat([value, key * inflow], dim=-1) * step).split(
        [value.shape[-1], key.shape[-1]], dim=-1
    )
    gains = key * outflow
    return ChannelBlock(
        *(inputs, 1, query, key, step, pairs, inflow, outflow, keep),
        *(scores, products, system, added, reads, gains, factors),
    )


def _halves(tokens: Tensor) -> Iterator[int]:
    """Go through the sizes of halves of chunks [..., chunk, width]: 1, 2, 4, ..."""
    half = 1
    while half < tokens.shape[-2]:
        yield half
        half *= 2


def _cut(tokens: Tensor, half: int) -> tuple[Tensor, ...]:
    """View chunks [..., chunk, width] as the first and the second halves of their parts, [..., parts, half, width]."""
    return tokens.unflatten(-2, (-1, 2, half)).unbind(-3)


def _rows(query: Tensor, key: Tensor, factor: Tensor) -> Tensor:
    return torch.cat([query * factor, key * factor], dim=-2)


def _corners(matrices: Tensor, half: int) -> Tensor:
    """View of [..., chunk, chunk] what is in rows of a second half and columns of the first half of the same part.

    [..., parts, half, half].
    """
    by_half = matrices.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))
    return by_half[..., :, 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

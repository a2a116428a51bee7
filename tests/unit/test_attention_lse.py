"""Attention with its log-sum-exp: both and their gradients by the formulas, and combination of parts of the keys."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from megalite.model.batch import first_keys
from megalite_kernels.attention import attention, attention_with_lse, dense_mask

BATCH, HEADS, TOKENS, WIDTH = 2, 4, 12, 6


def masks() -> dict[str, Tensor | None]:
    """Return masks of documents, windows and both; of fewer queries than keys; and with queries that see no key."""
    generator = torch.Generator().manual_seed(1)
    documents = first_keys((torch.rand(BATCH, TOKENS, generator=generator) < 0.3).cumsum(1))
    near = (torch.arange(TOKENS) - 3).clamp(min=0).unsqueeze(0)
    blind = torch.rand(BATCH, 1, TOKENS, TOKENS, generator=generator) < 0.5
    blind[0, 0, 2], blind[1, 0, 0], blind[1, 0, 7:9] = False, False, False
    return {
        "causal": None,
        "documents": dense_mask(documents),
        "window": dense_mask(near),
        "documents and window": dense_mask(torch.maximum(documents, near)),
        "the last queries": dense_mask(documents)[:, :, 7:],
        "blind": blind,
    }


MASKS = masks()


def inputs(queries: int, groups: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries)
    shapes = (HEADS, queries, WIDTH), (groups, TOKENS, WIDTH), (groups, TOKENS, WIDTH + 1)
    return [torch.randn(BATCH, *shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def queries_of(name: str) -> int:
    mask = MASKS[name]
    return TOKENS if mask is None else mask.shape[2]


def by_formula(
    parts: list[Tensor], mask: Tensor | None, scale: float, cap: float | None, upstream: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Return output, log-sum-exp and the gradients of query, key and value, query by query, without autograd."""
    query, key, value = (part.detach() for part in parts)
    grad_output, grad_lse = upstream
    output, lse = torch.zeros_like(grad_output), torch.full_like(grad_lse, -math.inf)
    gradients = [torch.zeros_like(part) for part in (query, key, value)]
    for b, h, q in torch.cartesian_prod(*(torch.arange(size) for size in grad_lse.shape)).tolist():
        group = h * key.shape[1] // HEADS
        seen = torch.arange(TOKENS) <= q if mask is None else mask[b % len(mask), 0, q]
        if not seen.any():
            continue
        keys, values = key[b, group, seen], value[b, group, seen]
        bent = plain = scale * (keys @ query[b, h, q])
        if cap is not None:
            bent = cap * torch.tanh(plain / cap)
        weights = bent.exp()
        lse[b, h, q] = weights.sum().log()
        weights = weights / weights.sum()
        output[b, h, q] = weights @ values
        # of a score: p * (its value's share of the gradient, less the mean of those shares, plus the lse's gradient)
        shares = values @ grad_output[b, h, q]
        of_score = weights * (shares - weights @ shares + grad_lse[b, h, q])
        if cap is not None:
            of_score = of_score * (1 - torch.tanh(plain / cap) ** 2)
        gradients[0][b, h, q] = scale * (of_score @ keys)
        gradients[1][b, group, seen] += scale * of_score.outer(query[b, h, q])
        gradients[2][b, group, seen] += weights.outer(grad_output[b, h, q])
    return [output, lse, *gradients]


def upstream_of(output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    of_output, of_lse = (torch.randn(part.shape, dtype=torch.float64, generator=generator) for part in (output, lse))
    return of_output, of_lse


@pytest.mark.parametrize(("groups", "scale", "cap"), [(HEADS, None, None), (2, 0.7, None), (1, 0.7, 1.5)])
@pytest.mark.parametrize("name", MASKS)
def test_both_outputs_and_their_gradients_are_those_of_the_formulas(
    name: str, groups: int, scale: float | None, cap: float | None
) -> None:
    parts = inputs(queries_of(name), groups)
    output, lse = attention_with_lse(*parts, MASKS[name], scale=scale, cap=cap)
    upstream = upstream_of(output, lse)
    found = [output, lse, *torch.autograd.grad([output, lse], parts, upstream)]
    expected = by_formula(parts, MASKS[name], scale or WIDTH**-0.5, cap, upstream)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    if name != "blind":
        plain = attention(*parts, MASKS[name], scale=scale, cap=cap, dropout=None)
        torch.testing.assert_close(output, plain, rtol=1e-12, atol=1e-12)


def test_a_query_that_sees_nothing_gives_nothing() -> None:
    parts = inputs(TOKENS, HEADS)
    output, lse = attention_with_lse(*parts, MASKS["blind"], scale=None, cap=None)
    nothing = ~MASKS["blind"].any(-1)
    assert nothing.sum() == 4
    assert not output[nothing.expand(-1, HEADS, -1)].any()
    assert torch.equal(lse == -math.inf, nothing.expand(-1, HEADS, -1))
    gradients = torch.autograd.grad([output, lse], parts, upstream_of(output, lse))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][nothing.expand(-1, HEADS, -1)].any()


@pytest.mark.parametrize("borders", [(0, 5, 12), (0, 1, 4, 12), tuple(range(13))], ids=["two", "three", "each"])
@pytest.mark.parametrize("name", [name for name in MASKS if name != "blind"])
def test_parts_of_the_keys_together_are_the_whole(name: str, borders: tuple[int, ...]) -> None:
    """Many queries see nothing in a part: keys of other documents, outside the window, or in the future."""
    parts = inputs(queries_of(name), 2)
    query, key, value = parts
    whole = attention_with_lse(*parts, MASKS[name], scale=0.7, cap=3.0)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None] if MASKS[name] is None else MASKS[name]
    found = []
    for start, stop in itertools.pairwise(borders):
        own = slice(start, stop)
        found.append(attention_with_lse(query, key[:, :, own], value[:, :, own], mask[..., own], scale=0.7, cap=3.0))
    lse = torch.stack([lse for _, lse in found]).logsumexp(0)
    output = sum(torch.exp(own - lse).unsqueeze(-1) * part for part, own in found)
    upstream = upstream_of(*whole)
    expected = [*whole, *torch.autograd.grad(whole, parts, upstream)]
    for ours, theirs in zip([output, lse, *torch.autograd.grad([output, lse], parts, upstream)], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_log_sum_exp_is_in_fp32(dtype: torch.dtype) -> None:
    """All scores are equal: the result is the logarithm of their number, of which bf16 has only two digits."""
    query, key, value = (torch.ones(1, 1, tokens, 4, dtype=dtype) for tokens in (1, 1000, 1000))
    mask = torch.ones(1, 1, 1, 1000, dtype=torch.bool)
    output, lse = attention_with_lse(query, key, value, mask, scale=0.25, cap=None)
    assert (output.dtype, lse.dtype) == (dtype, torch.float32)
    assert lse.item() == pytest.approx(1 + math.log(1000), rel=1e-6)

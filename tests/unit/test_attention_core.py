"""Attention core with log-sum-exp: the results for parts of the keys, combined, equal the result for all keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.errors import ConfigurationError
from megalite.model.attention_core import LocalCore
from megalite.parallel.randomness import RandomKey, Site
from megalite.parallel.sequence import SequenceLayout
from megalite_kernels.attention import Mask

TOKENS, BATCH, HEADS, WIDTH = 6, 2, 4, 3
CORE = LocalCore(
    heads=range(HEADS),
    groups=[0, 0, 1, 1],
    scale=0.7,
    cap=None,
    dropout=0.0,
    site=Site(0, "attention"),
    recompute=False,
)
CAUSAL = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
KEY = RandomKey(0, (1, 2))


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(TOKENS, BATCH, heads, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (HEADS, 2, 2)
    )
    return query, key, value


def together(core: LocalCore, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return attention to the first keys and to the last keys, combined; early queries see none of the last."""
    found = []
    for part in (slice(0, 2), slice(2, TOKENS)):
        found.append(core.with_lse(query, key[part], value[part], mask[..., part], KEY))
    lse = torch.stack([lse for _, lse in found]).logsumexp(0)
    return sum(torch.exp(own - lse).unsqueeze(-1) * mixed for mixed, own in found).flatten(2)


@pytest.mark.parametrize(
    "core",
    [
        CORE,
        replace(CORE, cap=1.5),
        replace(CORE, groups=[0, 1, 1, 1]),
        replace(CORE, scale=None, recompute=True),
    ],
    ids=["plain", "capped", "uneven groups", "recomputed"],
)
def test_parts_of_the_keys_together_are_the_core_of_all(core: LocalCore) -> None:
    parts, layout = inputs(), SequenceLayout.whole(TOKENS)
    whole = core(*parts, CAUSAL, layout, None)
    made = together(core, *parts, CAUSAL)
    torch.testing.assert_close(made, whole, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(whole.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad(whole, parts, upstream)
    for ours, theirs in zip(torch.autograd.grad(made, parts, upstream), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", [CAUSAL, None], ids=["dense", "causal"])
def test_backward_keeps_no_scores(mask: Mask) -> None:
    """Scores of queries and keys are computed again."""
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mixed, lse = CORE.with_lse(*inputs(), mask, None)
    assert BATCH * HEADS * TOKENS * TOKENS not in kept
    assert (mixed.shape, lse.shape) == ((TOKENS, BATCH, HEADS, WIDTH), (TOKENS, BATCH, HEADS))


def test_what_is_dropped_of_parts_is_refused() -> None:
    """In an evaluation, where nothing is dropped, it is accepted."""
    core = replace(CORE, dropout=0.1)
    with pytest.raises(ConfigurationError, match=r"--attention-dropout 0\.1: .* give --attention-dropout 0"):
        core.with_lse(*inputs(), CAUSAL, KEY)
    core.with_lse(*inputs(), CAUSAL, None)

"""Attention with a sink against a softmax over one more column, written out: outputs, gradients, memory, precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megalite_kernels import attention as kernel
from megalite_kernels.attention_sink import attention_with_sink
from tests.unit.test_attention import graphs, heads, micro_batch
from tests.unit.test_attention_lse import BATCH, HEADS, MASKS, TOKENS, inputs, queries_of

__all__ = ["graphs"]  # a fixture


def written_out(parts: list[Tensor], sink: Tensor, mask: Tensor | None, scale: float, cap: float | None) -> Tensor:
    query, key, value = parts
    key, value = (shared.repeat_interleave(query.shape[1] // shared.shape[1], dim=1) for shared in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril() if mask is None else mask
    column = sink[:, None, None].expand(*scores.shape[:3], 1)
    probabilities = torch.cat([scores.masked_fill(~seen, -math.inf), column], dim=-1).softmax(dim=-1)
    return probabilities[..., :-1] @ value


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("groups", "cap"), [(HEADS, None), (2, 2.0), (1, None)])
def test_it_is_a_softmax_with_one_more_logit(mask: str, groups: int, cap: float | None) -> None:
    """Queries that see no key get 0: all goes to the sink."""
    parts = [*inputs(queries_of(mask), groups), torch.randn(HEADS, dtype=torch.float64).requires_grad_()]
    parts[2] = parts[2].detach()[..., :-1].requires_grad_()  # the operator wants one width
    *three, sink = parts
    found = []
    for mixed in (
        attention_with_sink(*three, MASKS[mask], sink, scale=0.7, cap=cap, dropout=None),
        written_out(three, sink, MASKS[mask], 0.7, cap),
    ):
        found.append([mixed, *torch.autograd.grad(mixed.sin().sum(), parts)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.wide
def test_in_blocks_it_is_the_dense_one(graphs: dict[str, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [heads(256, count, generator) for count in (4, 2, 2)]
    sink = torch.randn(4, dtype=torch.float64, generator=generator).requires_grad_()
    first_keys = micro_batch(256).first_keys
    assert first_keys is not None
    found = []
    for mask in (kernel.block_mask(first_keys), kernel.dense_mask(first_keys)):
        mixed = attention_with_sink(*parts, mask, sink, scale=None, cap=None, dropout=None)
        found.append([mixed, *torch.autograd.grad(mixed.sin().sum(), [*parts, sink])])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_no_scores_are_kept_for_backward() -> None:
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    query, key, value = (torch.randn(1, 2, 64, 4, requires_grad=True) for _ in range(3))
    sink = torch.randn(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attention_with_sink(query, key, value, None, sink, scale=None, cap=2.0, dropout=None)
    assert max(kept) == query.numel()


def test_in_bf16_it_is_as_precise_as_attention_without_a_sink() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(BATCH, HEADS, 4 * TOKENS, 8, dtype=torch.float64, generator=generator) for _ in range(3)]
    sink = torch.randn(HEADS, dtype=torch.float64, generator=generator)
    exact, sink = [part.bfloat16().double() for part in exact], sink.bfloat16().double()
    narrow = [part.bfloat16() for part in exact]
    expected = written_out(exact, sink, None, 8**-0.5, None)
    ours = attention_with_sink(*narrow, None, sink.bfloat16(), scale=None, cap=None, dropout=None)
    plain = kernel.attention(*narrow, None, scale=None, cap=None, dropout=None)
    without = written_out(exact, torch.full((HEADS,), -math.inf, dtype=torch.float64), None, 8**-0.5, None)
    assert (ours.double() - expected).abs().max() < 2 * (plain.double() - without).abs().max()

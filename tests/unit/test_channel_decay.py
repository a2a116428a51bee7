"""The delta rule with a decay for each key channel: chunks against the recurrence token by token."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megalite_kernels.recurrence import Segment, recurrence, step_once
from tests.harness.close import assert_bits_equal
from tests.recurrent_oracle import recurrence_in_torch
from tests.unit.test_recurrence import (
    GRADIENTS,
    OUTPUTS,
    InOneProcess,
    Sizes,
    assert_is_the_recurrence,
    distance,
    firsts,
    inputs,
    segments,
    single_thread,
    with_gradients,
)

__all__ = ["single_thread"]

USUAL = Sizes(2, 3, 3, 8, 6)


def by_channel(tokens: int, strength: float, sizes: Sizes = USUAL, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return query, key, value, decay and step. Decays of channels are between 0 and `strength`."""
    query, key, value, decay, step = inputs(tokens, strength, sizes, dtype)
    generator = torch.Generator().manual_seed(tokens + 1)
    shares = torch.rand(*decay.shape, sizes.key_width, generator=generator, dtype=torch.float64)
    return [query, key, value, (decay.detach().unsqueeze(-1) * shares.to(decay.dtype)).requires_grad_(), step]


@pytest.mark.wide_except("16-lasting", "64-fleeting", "128-gone")
@pytest.mark.parametrize("strength", [1e-3, 8.0, 400.0], ids=["lasting", "fleeting", "gone"])
@pytest.mark.parametrize("chunk", [16, 64, 128])
def test_chunks_are_the_recurrence(strength: float, chunk: int) -> None:
    given, first = by_channel(149, strength), firsts(149, [5, 64, 100], [])
    assert_is_the_recurrence(given, first, True, chunk=chunk, segments=segments(first, [0, 149]))


@pytest.mark.parametrize("sizes", [Sizes(1, 1, 1, 4, 4), Sizes(1, 3, 3, 1, 2)], ids=str)
@pytest.mark.parametrize(("tokens", "chunk"), [(1, 16), (7, 1), (33, 8)])
def test_samples_of_one_document(tokens: int, chunk: int, sizes: Sizes) -> None:
    first = torch.zeros(sizes.batch, tokens, dtype=torch.int64)
    assert_is_the_recurrence(by_channel(tokens, 0.5, sizes), first, True, chunk=chunk)


@pytest.mark.parametrize("cuts", [[0, 45], [0, 16, 21, 45]], ids=str)
def test_documents_may_begin_at_every_position(cuts: list[int]) -> None:
    sizes = Sizes(46, 1, 1, 3, 2)
    first = firsts(45, *([start, start + 2] for start in range(46)))
    assert_is_the_recurrence(by_channel(45, 1.0, sizes), first, True, chunk=8, segments=segments(first, cuts))


def test_a_large_decay_does_not_hide_the_small_ones_after_it() -> None:
    """In fp32, sums of decays with 10^9 among them would round away those of 0.1."""
    given = by_channel(48, 0.5, dtype=torch.float32)
    given[3] = given[3].detach().index_fill(0, torch.tensor([3, 20]), -1e9).requires_grad_()
    exact = [each.detach().double().requires_grad_() for each in given]
    output, _ = recurrence(*given, delta=True, chunk=16)
    expected, _ = recurrence_in_torch(*exact, torch.zeros(2, 48, dtype=torch.int64), delta=True)
    for ours, theirs in zip(with_gradients(given, output), with_gradients(exact, expected), strict=True):
        assert distance(ours.double(), theirs) < 1e-5


def test_a_decay_of_everything_gives_numbers() -> None:
    given = by_channel(20, 1.0)
    given[3] = torch.full_like(given[3], -torch.inf).requires_grad_()
    output, state = recurrence(*given, delta=True, chunk=8)
    found = with_gradients(given, output)
    assert all(each.isfinite().all() for each in (state, *found))
    query, key, value, _, step = given
    torch.testing.assert_close(output, (query * key).sum(-1, keepdim=True) * step.unsqueeze(-1) * value)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]], ids=str)
def test_segments_on_several_ranks(order: list[int]) -> None:
    """Segments that stand in another order than in the sample, one of them cut within a chunk."""
    given, first = by_channel(45, 0.3), firsts(45, [19, 30], [])
    expected, _ = recurrence(*given, delta=True, chunk=8, segments=segments(first, [0, 45]))
    ranges = list(pairwise([0, 16, 21, 32, 45]))
    place = [order.index(number) for number in range(4)]
    own = torch.cat([torch.arange(*ranges[number]) for number in order])
    parts = [Segment(range(*ranges[n]), first[:, slice(*ranges[n])]) for n in order]
    moved = [each[own].detach().requires_grad_() for each in given]
    output, _ = recurrence(*moved, delta=True, chunk=8, segments=parts, scan=InOneProcess(place))
    wanted = with_gradients(given, expected)
    gradient = torch.zeros_like(expected)
    generator = torch.Generator().manual_seed(7)
    gradient = torch.randn(expected.shape, generator=generator, dtype=torch.float64).to(torch.bfloat16).double()
    grads = torch.autograd.grad(output, moved, gradient[own])
    assert distance(output, wanted[0][own]) <= OUTPUTS
    for ours, theirs in zip(grads, wanted[1:], strict=True):
        assert distance(ours, theirs[own]) <= GRADIENTS


def test_a_token_alone_is_the_same_as_one_of_many() -> None:
    given = by_channel(9, 0.7)
    expected, last = recurrence(*given, delta=True, chunk=4)
    state = torch.zeros_like(last)
    outputs = []
    for token in range(9):
        output, state = step_once(*(each[token : token + 1] for each in given), delta=True, state=state)
        outputs.append(output)
    assert distance(torch.cat(outputs), expected) <= OUTPUTS
    assert distance(state, last) <= OUTPUTS


def test_segments_on_the_grid_have_the_same_bits() -> None:
    given, first = by_channel(48, 0.3), firsts(48, [19, 30], [])
    whole, _ = recurrence(*given, delta=True, chunk=16, segments=segments(first, [0, 48]))
    cut, _ = recurrence(*given, delta=True, chunk=16, segments=segments(first, [0, 16, 48]))
    for ours, theirs in zip(with_gradients(given, cut), with_gradients(given, whole), strict=True):
        assert_bits_equal(ours, theirs)

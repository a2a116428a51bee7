"""Recurrences in chunks against the recurrence token by token, in outputs, states and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite_kernels.recurrence import Segment, advance, recurrence, retreat, step_once
from tests.distributed.layout_expected import one_thread
from tests.harness.close import assert_bits_equal, assert_rounded_once
from tests.recurrent_oracle import delta_rule, recurrence_in_torch, state_space

OUTPUTS, GRADIENTS = 1e-12, 1e-10
KINDS = pytest.mark.parametrize("delta", [True, False], ids=["delta", "additive"])


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


class Sizes(NamedTuple):
    batch: int = 2
    key_heads: int = 2
    heads: int = 4
    key_width: int = 8
    width: int = 6


USUAL = Sizes()


def inputs(tokens: int, strength: float, sizes: Sizes = USUAL, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return query, key, value, decay and step. Decays are at most `strength`; keys have the length 1."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(tokens, sizes.batch, *shape, generator=generator, dtype=torch.float64)

    query, key = draw(sizes.key_heads, sizes.key_width), draw(sizes.key_heads, sizes.key_width)
    decay, step = (draw(sizes.heads).sigmoid() for _ in range(2))
    wide = torch.promote_types(dtype, torch.float32)
    found = query, key / key.norm(dim=-1, keepdim=True), draw(sizes.heads, sizes.width)
    return [each.to(dtype).requires_grad_() for each in found] + [
        each.to(wide).requires_grad_() for each in (decay * -strength, step)
    ]


def firsts(tokens: int, *starts: Sequence[int]) -> Tensor:
    """Return the first token of each token's document, [batch, tokens], of samples whose documents begin there."""
    first = torch.zeros(len(starts), tokens, dtype=torch.int64)
    for row, of_sample in zip(first, starts, strict=True):
        for start in of_sample:
            row[start:] = start
    return first


def segments(first: Tensor, cuts: Sequence[int]) -> list[Segment]:
    return [Segment(range(start, stop), first[:, start:stop]) for start, stop in pairwise(cuts)]


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest element, of zeros the difference itself."""
    largest = expected.detach().abs().max().item()
    return (found - expected).detach().abs().max().item() / (largest or 1.0)


def with_gradients(given: Sequence[Tensor], output: Tensor) -> list[Tensor]:
    """Return the output and the gradients of what it was computed from; its own is exact in each dtype."""
    generator = torch.Generator().manual_seed(7)
    gradient = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(torch.bfloat16)
    return [output.detach(), *torch.autograd.grad(output, given, gradient.to(output.dtype))]


def assert_is_the_recurrence(given: Sequence[Tensor], first: Tensor, delta: bool, **how: Any) -> None:
    output, state = recurrence(*given, delta=delta, **how)
    expected, last = recurrence_in_torch(*given, first, delta=delta)
    assert distance(state, last) <= OUTPUTS
    names = "output", "query", "key", "value", "decay", "step"
    found = zip(names, with_gradients(given, output), with_gradients(given, expected), strict=True)
    for name, ours, theirs in found:
        assert distance(ours, theirs) <= (OUTPUTS if name == "output" else GRADIENTS), name


class InOneProcess:
    """A scan of a process that has all segments, which stand in another order than those of the samples."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order = order

    def entering(self, maps: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        found, state = [maps[0][1]] * len(maps), torch.zeros_like(maps[0][1])
        for place in self.order:
            found[place], state = state, advance(*maps[place], state)
        return found

    def leaving(self, maps: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        found, gradient = [maps[0][1]] * len(maps), torch.zeros_like(maps[0][1])
        for place in reversed(self.order):
            found[place], gradient = gradient, retreat(*maps[place], gradient)
        return found


def test_the_two_oracles_agree() -> None:
    given, first = inputs(40, 1.0), firsts(40, [3, 20], [17])
    for delta, oracle in ((True, delta_rule), (False, state_space)):
        output, last = oracle(*(each.detach().numpy() for each in given), first.numpy())
        expected, state = recurrence_in_torch(*given, first, delta=delta)
        np.testing.assert_allclose(expected.detach(), output, rtol=0, atol=1e-13)
        np.testing.assert_allclose(state.detach(), last, rtol=0, atol=1e-13)


@pytest.mark.wide_except("16-fleeting-delta", "64-lasting-delta", "16-lasting-additive", "128-fleeting-additive")
@KINDS
@pytest.mark.parametrize("strength", [1e-3, 8.0], ids=["lasting", "fleeting"])
@pytest.mark.parametrize("chunk", [16, 64, 128])
def test_chunks_are_the_recurrence(delta: bool, strength: float, chunk: int) -> None:
    given, first = inputs(149, strength), firsts(149, [5, 64, 100], [])
    assert_is_the_recurrence(given, first, delta, chunk=chunk, segments=segments(first, [0, 149]))


@KINDS
@pytest.mark.parametrize("sizes", [Sizes(1, 1, 1, 4, 4), Sizes(1, 1, 3, 5, 2), Sizes(3, 4, 4, 1, 8)], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_samples_of_one_document_shorter_than_a_chunk_and_longer(delta: bool, sizes: Sizes, tokens: int) -> None:
    first = torch.zeros(sizes.batch, tokens, dtype=torch.int64)
    assert_is_the_recurrence(inputs(tokens, 0.5, sizes), first, delta, chunk=16)


@KINDS
@pytest.mark.parametrize("cuts", [[0, 45], [0, 16, 21, 45]], ids=str)
def test_documents_may_begin_at_every_position(delta: bool, cuts: list[int]) -> None:
    """Each sample of the batch has another position, and two of them another beside it."""
    first = firsts(45, *([start] for start in range(45)), [20, 21], [16, 40])
    given = inputs(45, 0.1, Sizes(len(first), 1, 2, 4, 3))
    assert_is_the_recurrence(given, first, delta, chunk=16, segments=segments(first, cuts))


@pytest.mark.wide_except(
    *("False-[0, 64, 128, 150]-delta", "True-[0, 3, 70, 150]-delta"),
    *("False-[0, 3, 70, 150]-additive", "True-[0, 70, 75, 76, 150]-additive"),
)
@KINDS
@pytest.mark.parametrize("cuts", [[0, 64, 128, 150], [0, 3, 70, 150], [0, 70, 75, 76, 150]], ids=str)
@pytest.mark.parametrize("documents", [True, False])
def test_segments_in_any_order_pass_states_on(delta: bool, cuts: list[int], documents: bool) -> None:
    first = firsts(150, [5, 70, 100], [64]) if documents else firsts(150, [], [])
    given, own = inputs(150, 0.1), segments(first, cuts)
    if not documents:
        own = [Segment(tokens, None) for tokens, _ in own]
    assert_is_the_recurrence(given, first, delta, chunk=32, segments=own)
    order = list(range(len(own)))[::-1]
    order[0], order[1] = order[1], order[0]
    shuffled, places = [own[i] for i in order], sorted(order, key=order.index)
    moved = [torch.cat([each[cuts[i] : cuts[i + 1]] for i in order]) for each in given]
    output, _ = recurrence(*moved, delta=delta, chunk=32, segments=shuffled, scan=InOneProcess(np.argsort(places)))
    parts = dict(zip(order, output.split([len(tokens) for tokens, _ in shuffled]), strict=True))
    whole = torch.cat([parts[i] for i in range(len(own))])
    expected, _ = recurrence_in_torch(*given, first, delta=delta)
    found = zip(with_gradients(given, whole), with_gradients(given, expected), strict=True)
    assert max(distance(ours, theirs) for ours, theirs in found) <= GRADIENTS


@pytest.mark.bits
@KINDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [Sizes(2, 2, 4, 16, 32), Sizes(1, 1, 1, 64, 64), Sizes(1, 1, 3, 16, 16)], ids=str)
def test_cuts_between_chunks_change_no_bit(delta: bool, dtype: torch.dtype, sizes: Sizes) -> None:
    """Widths are multiples of 64 bytes: of others, another number of products may add in another order."""
    first = firsts(128, *[[5, 64, 100]] * sizes.batch)
    given, how = inputs(128, 0.1, sizes, dtype), {"delta": delta, "chunk": 16}
    output, last = recurrence(*given, **how, segments=segments(first, [0, 128]))
    expected = with_gradients(given, output)
    for cuts in ([0, 64, 128], [0, 16, 128], [0, 32, 48, 112, 128]):
        found, _ = recurrence(*given, **how, segments=segments(first, cuts))
        for ours, theirs in zip(with_gradients(given, found), expected, strict=True):
            assert_bits_equal(ours, theirs)
        state, outputs = None, []
        for own in segments(first, cuts):
            part = [each[own.tokens.start : own.tokens.stop] for each in given]
            found, state = recurrence(*part, **how, segments=[own], state=state)
            outputs.append(found)
        assert state is not None
        assert_bits_equal(torch.cat(outputs).detach(), expected[0])
        assert_bits_equal(state, last)


@KINDS
def test_the_grid_counts_from_the_start_of_the_sample(delta: bool) -> None:
    """A segment that begins on another token has a first chunk that ends on the grid."""
    first, given = firsts(64, [], []), inputs(64, 0.1)
    parts = [[each[start:stop] for each in given] for start, stop in ((0, 21), (21, 64))]
    states = []
    for stop in (32, 64):
        _, state = recurrence(*parts[0], delta=delta, chunk=16, segments=segments(first, [0, 21]))
        own = [each[: stop - 21] for each in parts[1]]
        _, state = recurrence(*own, delta=delta, chunk=16, segments=segments(first, [21, stop]), state=state)
        states.append(state)
    _, last = recurrence(
        *(each[32:] for each in given), delta=delta, chunk=16, segments=segments(first, [32, 64]), state=states[0]
    )
    assert_bits_equal(last, states[1])


@KINDS
def test_half_precision_is_rounded_once(delta: bool) -> None:
    given, first = inputs(512, 0.05, Sizes(1, 1, 2, 16, 16), torch.bfloat16), firsts(512, [100])
    exact = [each.detach().double().requires_grad_() for each in given]
    output, state = recurrence(*given, delta=delta, chunk=64, segments=segments(first, [0, 512]))
    expected, last = recurrence_in_torch(*exact, first, delta=delta)
    assert output.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert distance(state, last) <= 1e-5
    found, wanted = with_gradients(given, output), with_gradients(exact, expected)
    for ours, theirs in zip(found[:4], wanted[:4], strict=True):
        assert_rounded_once(ours, theirs)
    for ours, theirs in zip(found[4:], wanted[4:], strict=True):
        assert ours.dtype == torch.float32
        assert distance(ours, theirs) <= 1e-4


@KINDS
def test_tokens_that_forget_everything_give_no_nan(delta: bool) -> None:
    given = inputs(50, 1e5, dtype=torch.float32)
    first = firsts(50, [7], [])
    output, state = recurrence(*given, delta=delta, chunk=32, segments=segments(first, [0, 21, 50]))
    for each in (state, *with_gradients(given, output)):
        assert each.isfinite().all()


@KINDS
def test_the_state_after_a_prompt_goes_on_token_by_token(delta: bool) -> None:
    given = [each.detach() for each in inputs(60, 0.1)]
    expected, last = recurrence(*given, delta=delta, chunk=16)
    output, state = recurrence(*(each[:37] for each in given), delta=delta, chunk=16)
    outputs = [output]
    for token in range(37, 60):
        output, state = step_once(*(each[token : token + 1] for each in given), delta=delta, state=state)
        outputs.append(output)
    assert distance(torch.cat(outputs), expected) <= OUTPUTS
    assert distance(state, last) <= OUTPUTS


@KINDS
def test_backward_keeps_the_inputs_and_a_state_a_chunk(delta: bool) -> None:
    tokens, chunk, sizes = 256, 64, Sizes(1, 2, 2, 16, 16)
    given, kept = inputs(tokens, 0.1, sizes, torch.float32), {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output, state = recurrence(*given, delta=delta, chunk=chunk)
    assert output.requires_grad
    assert not state.requires_grad
    of_tokens, of_states = 5 * tokens * sizes.heads * sizes.width, tokens // chunk * sizes.heads * 16 * 16
    assert sum(kept.values()) <= of_tokens + of_states


@pytest.mark.parametrize("delta", [True, False])
def test_large_decays_leave_small_ones_beside_them_exact(delta: bool) -> None:
    """A tenth of the tokens forget all that was before: cumulative sums are large, and their differences small."""
    generator = torch.Generator().manual_seed(5)
    tokens = 256
    query, key, value = (torch.randn(tokens, 1, 2, 16, generator=generator) for _ in range(3))
    key = key / key.norm(dim=-1, keepdim=True)
    step = torch.rand(tokens, 1, 2, generator=generator)
    decay = -0.01 * torch.rand(tokens, 1, 2, generator=generator)
    decay = torch.where(torch.rand(tokens, 1, 2, generator=generator) < 0.1, -5000.0, decay)
    inputs = (query, key, value, decay, step)
    found, _ = recurrence(*inputs, delta=delta, chunk=64)
    exact, _ = recurrence(*(each.double() for each in inputs), delta=delta, chunk=64)
    assert ((found - exact).norm() / exact.norm()).item() < 2e-6  # roundings of products in fp32

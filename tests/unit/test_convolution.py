"""The short convolution against the formula, with documents, cuts and caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalite_kernels import convolution as kernel
from megalite_kernels.convolution import convolution_step, short_convolution
from tests.distributed.layout_expected import one_thread
from tests.harness.close import assert_bits_equal, assert_rounded_once
from tests.recurrent_oracle import convolution
from tests.unit.test_recurrence import distance, firsts, segments, with_gradients

TOKENS, BATCH, CHANNELS = 40, 2, 5


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def inputs(tokens: int, taps: int, *, bias: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return input, weight and, if wanted, bias."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, BATCH, CHANNELS), (CHANNELS, taps), (CHANNELS,)][: 3 if bias else 2]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [each.to(dtype).requires_grad_() for each in drawn]


def halos(input: Tensor, cuts: Sequence[int], taps: int) -> list[Tensor]:
    """Return the tokens before each segment, as views of the input that pass gradients on."""
    padded = torch.cat([input.new_zeros(taps - 1, *input.shape[1:]), input])
    return [padded[cut : cut + taps - 1] for cut in cuts[:-1]]


@pytest.mark.parametrize("cuts", [[0, 40], [0, 1, 2, 17, 40]], ids=str)
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("tokens_in_a_block", [3, 1000])
def test_it_is_the_formula_wherever_it_is_cut(cuts: list[int], taps: int, silu: bool, tokens_in_a_block: int) -> None:
    given, first = inputs(TOKENS, taps, bias=silu), firsts(TOKENS, [3, 4, 17, 18, 30], [])
    bias = given[2] if silu else None
    with mock.patch.object(kernel, "chunk_elements", return_value=tokens_in_a_block * BATCH * CHANNELS):
        before = halos(given[0], cuts, taps)
        output = short_convolution(given[0], given[1], bias, segments(first, cuts), before, silu=silu)
        found = with_gradients(given, output)
    expected = convolution(given[0], given[1], bias, first, silu=silu)
    for ours, theirs in zip(found, with_gradients(given, expected), strict=True):
        assert distance(ours, theirs) <= 1e-13


def test_documents_may_begin_at_every_position() -> None:
    """Each sample of the batch has another position."""
    first = firsts(12, *([start] for start in range(12)))
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((12, 12, 3), (3, 4), (3,))]
    expected = convolution(*given, first, silu=True)
    for cuts in ([0, 12], [0, 5, 7, 12]):
        found = short_convolution(*given, segments(first, cuts), halos(given[0], cuts, 4))
        assert distance(found, expected) <= 1e-14


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_cuts_change_no_bit_of_the_output(dtype: torch.dtype) -> None:
    given, first = inputs(TOKENS, 4, bias=True, dtype=dtype), firsts(TOKENS, [3, 4, 17], [18, 30])
    whole = short_convolution(*given, segments(first, [0, TOKENS]))
    for cut in range(1, TOKENS):
        cuts = [0, cut, TOKENS]
        found = short_convolution(*given, segments(first, cuts), halos(given[0], cuts, 4))
        assert_bits_equal(found.detach(), whole.detach())


def test_half_precision_is_rounded_once() -> None:
    given, first = inputs(TOKENS, 4, bias=True, dtype=torch.bfloat16), firsts(TOKENS, [3], [])
    output = short_convolution(*given, segments(first, [0, TOKENS]))
    exact = [each.detach().double().requires_grad_() for each in given]
    expected = convolution(*exact, first, silu=True)
    for ours, theirs in zip(with_gradients(given, output), with_gradients(exact, expected), strict=True):
        assert ours.dtype == torch.bfloat16
        assert_rounded_once(ours, theirs)


@pytest.mark.bits
@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("silu", [True, False])
def test_token_by_token_it_has_the_same_bits(taps: int, silu: bool) -> None:
    input, weight, bias = (each.detach() for each in inputs(TOKENS, taps, bias=True, dtype=torch.float32))
    tail, outputs = input.new_zeros(taps - 1, BATCH, CHANNELS), []
    for token in range(TOKENS):
        output, tail = convolution_step(input[token : token + 1], weight, bias, tail, silu=silu)
        outputs.append(output)
    assert_bits_equal(torch.cat(outputs), short_convolution(input, weight, bias, silu=silu))
    assert_bits_equal(tail, input[TOKENS - taps + 1 :])


def test_backward_keeps_no_more_than_the_inputs() -> None:
    given, kept = inputs(TOKENS, 4, bias=True), set()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    before = [given[0].new_zeros(3, BATCH, CHANNELS)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        short_convolution(*given, segments(firsts(TOKENS, [], []), [0, TOKENS]), before)
    assert kept == {each.untyped_storage().data_ptr() for each in (*given, *before)}

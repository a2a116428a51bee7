"""The short convolution's kernels, forward and backward, against the formula in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megalite_kernels.chunks import Segment
from megalite_kernels.convolution import convolution_step, short_convolution
from megalite_kernels.implementation import Kernels, use
from tests.harness.close import assert_bits_equal
from tests.kernels.cells import cells, named
from tests.kernels.interpreter import only_programs
from tests.recurrent_oracle import convolution

# Of the norm of the error: 8 and 2 roundings to nearest of the dtype.
TOLERANCE = {torch.float32: 5e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
# tokens, batch, channels, taps, and where segments are cut
SHAPES = {
    "one token": (1, 1, 3, 4, ()),
    "one tap": (5, 2, 6, 1, (2,)),
    "two taps": (19, 2, 130, 2, (16,)),
    "one segment": (40, 3, 20, 4, ()),
    "cut often": (23, 2, 17, 4, (1, 2, 4, 21)),
    "many taps": (9, 1, 5, 6, (3,)),
}
FORMS = {"SiLU and bias": (True, True), "bias": (False, True), "SiLU": (True, False), "plain": (False, False)}


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def first_tokens(tokens: int, batch: int) -> Tensor:
    """Return the first token of each token's document, [batch, tokens], of documents of another length each sample."""
    lengths = torch.tensor([3 + 2 * sample for sample in range(batch)])[:, None]
    return torch.arange(tokens) // lengths * lengths


def cut(input: Tensor, first: Tensor | None, taps: int, cuts: tuple[int, ...]) -> tuple[list[Segment], list[Tensor]]:
    """Return the segments, and the tokens before each as views of the input that pass gradients on."""
    padded = torch.cat([input.new_zeros(taps - 1, *input.shape[1:]), input])
    bounds = list(pairwise((0, *cuts, len(input))))
    segments = [Segment(range(*each), None if first is None else first[:, slice(*each)]) for each in bounds]
    return segments, [padded[start : start + taps - 1] for start, _ in bounds]


def with_gradients(output: Tensor, inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient.to(output.dtype))]


@pytest.mark.parametrize("documents", [True, False], ids=["documents", "one document"])
@pytest.mark.parametrize(
    ("dtype", "shape", "form"),
    cells(
        named([*TOLERANCE], lambda dtype: str(dtype)[6:]),
        SHAPES,
        FORMS,
        kept=lambda dtype, shape, form: (shape + form) % 3 == dtype and (shape + 2 * form) % 4 < 2,
    ),
)
def test_output_and_gradients_are_those_of_float64(
    dtype: torch.dtype, shape: tuple[int, int, int, int, tuple[int, ...]], form: tuple[bool, bool], documents: bool
) -> None:
    (tokens, batch, channels, taps, cuts), (silu, biased) = shape, form
    first = first_tokens(tokens, batch) if documents else torch.zeros(batch, tokens, dtype=torch.int64)
    drawn = [numbers(tokens, batch, channels, seed=1), numbers(channels, taps, seed=2), numbers(channels, seed=3)]
    given = [each.to(dtype).requires_grad_() for each in drawn[: 2 + biased]]
    gradient = numbers(batch, tokens, channels, seed=4).transpose(0, 1).to(dtype)
    segments, halos = cut(given[0], first if documents else None, taps, cuts)
    bias = given[2] if biased else None
    found = with_gradients(short_convolution(given[0], given[1], bias, segments, halos, silu=silu), given, gradient)
    wide = [each.detach().double().requires_grad_() for each in given]
    exact = convolution(wide[0], wide[1], wide[2] if biased else None, first, silu=silu)
    # Each cut adds a rounding to the gradient of a token before it.
    tolerance = TOLERANCE[dtype] * (2 if cuts else 1)
    for ours, theirs in zip(found, with_gradients(exact, wide, gradient.double()), strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.wide
def test_documents_may_begin_at_every_position() -> None:
    first = torch.zeros(6, 6, dtype=torch.int64)
    for start in range(6):
        first[start, start:] = start
    given = [numbers(*shape, seed=1).requires_grad_() for shape in ((6, 6, 3), (3, 4), (3,))]
    gradient, wide = numbers(6, 6, 3, seed=2), [each.detach().double().requires_grad_() for each in given]
    exact = convolution(wide[0], wide[1], wide[2], first, silu=True)
    expected = with_gradients(exact, wide, gradient)
    for cuts in ((), (4,)):
        output = short_convolution(given[0], given[1], given[2], *cut(given[0], first, 4, cuts))
        for ours, theirs in zip(with_gradients(output, given, gradient), expected, strict=True):
            assert (ours.double() - theirs).norm() <= 5e-7 * theirs.norm()


def test_cuts_change_no_bit_of_the_output() -> None:
    input, weight, bias = numbers(24, 2, 6, seed=1), numbers(6, 4, seed=2), numbers(6, seed=3)
    first = first_tokens(24, 2)
    whole = short_convolution(input, weight, bias, *cut(input, first, 4, ()))
    for cuts in ((1,), (16,), (3, 4, 20)):
        assert_bits_equal(short_convolution(input, weight, bias, *cut(input, first, 4, cuts)), whole)


def test_strides_change_no_bit() -> None:
    """A part of a projection, tokens that are apart, channels that are, and rows that are one."""
    weight, bias, gradient = numbers(6, 4, seed=2), numbers(6, seed=3), numbers(9, 2, 6, seed=4)
    for input in (
        numbers(9, 2, 20, seed=1)[..., 3:9],
        numbers(18, 4, 6, seed=1)[::2, 1::2],
        numbers(6, 2, 9, seed=1).transpose(0, 2),
        numbers(1, 1, 6, seed=1).expand(9, 2, 6),
    ):
        results = []
        for own in (input, input.contiguous()):
            leaves = [each.detach().requires_grad_() for each in (own, weight, bias)]
            found = short_convolution(leaves[0], leaves[1], leaves[2])
            results.append(with_gradients(found, leaves, gradient))
        for ours, theirs in zip(*results, strict=True):
            assert_bits_equal(ours, theirs)


def test_a_tail_of_a_cache_is_a_halo() -> None:
    input, weight = numbers(7, 2, 5, seed=1), numbers(5, 3, seed=2)
    tail, outputs = input.new_zeros(2, 2, 5), []
    for token in input.split(1):
        output, tail = convolution_step(token, weight, None, tail)
        outputs.append(output)
    found = [short_convolution(input[:4], weight, None), short_convolution(input[4:], weight, None, None, [input[2:4]])]
    torch.testing.assert_close(torch.cat(found), torch.cat(outputs), rtol=1e-6, atol=1e-6)


def test_nothing_has_no_gradient() -> None:
    for shape in ((0, 2, 3), (2, 0, 3)):
        given = [torch.empty(shape).requires_grad_(), numbers(3, 4, seed=1).requires_grad_()]
        found = with_gradients(short_convolution(given[0], given[1], None), given, torch.ones(shape))
        assert [each.shape for each in found] == [shape, shape, (3, 4)]
        assert not found[2].any()


def test_the_operation_can_be_left_to_the_reference() -> None:
    input, weight = numbers(5, 1, 3, seed=1), numbers(3, 2, seed=2)
    found = short_convolution(input, weight, None)
    use(Kernels("triton", to_reference=("short_convolution",)))
    with only_programs():  # no kernel runs
        torch.testing.assert_close(short_convolution(input, weight, None), found)

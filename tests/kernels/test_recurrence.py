"""The kernels of recurrences, forward and backward, against the recurrence token by token in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite_kernels import recurrence_segment
from megalite_kernels.implementation import Kernels, use
from megalite_kernels.recurrence import recurrence
from tests.harness.close import assert_bits_equal, assert_rounded_once
from tests.kernels.cells import cells
from tests.kernels.interpreter import only_programs, stock
from tests.recurrent_oracle import recurrence_in_torch
from tests.unit.test_recurrence import InOneProcess, Sizes, distance, firsts, inputs, segments, with_gradients

KINDS = {"delta": True, "additive": False}
SIZES = {
    "key heads are shared": Sizes(1, 1, 2, 16, 16),
    "several samples": Sizes(2, 1, 1, 8, 40),
    "wide": Sizes(1, 1, 1, 80, 6),
}
CUTS = {"whole": [0, 40], "on the grid": [0, 16, 40], "anywhere": [0, 5, 20, 40]}


def assert_is_the_recurrence(
    given: Sequence[Tensor], first: Tensor, delta: bool, bound: float = 1e-5, **how: Any
) -> None:
    """Outputs and gradients in half precision are rounded once; `bound` is of the largest error of those in fp32."""
    output, state = recurrence(*given, delta=delta, **how)
    exact = [each.detach().double().requires_grad_() for each in given]
    expected, last = recurrence_in_torch(*exact, first, delta=delta)
    assert distance(state, last) <= bound
    found, wanted = with_gradients(given, output), with_gradients(exact, expected)
    for ours, theirs in zip(found[:4], wanted[:4], strict=True):
        assert ours.dtype == given[0].dtype
        assert_rounded_once(ours, theirs)
    for ours, theirs in zip(found[4:], wanted[4:], strict=True):
        assert ours.dtype == torch.float32
        assert distance(ours, theirs) <= bound


@pytest.mark.wide_except(
    "delta-key heads are shared-whole",
    "delta-several samples-on the grid",
    "additive-several samples-anywhere",
    "additive-wide-whole",
)
@pytest.mark.parametrize(
    ("delta", "sizes", "cuts"),
    cells(KINDS, SIZES, CUTS, kept=lambda delta, sizes, cuts: (delta + sizes) % 3 == cuts),
)
def test_outputs_states_and_gradients_are_those_of_float64(delta: bool, sizes: Sizes, cuts: list[int]) -> None:
    first = firsts(40, *[[5, 33], [32]][: sizes.batch])
    given = inputs(40, 0.5, sizes, torch.bfloat16)
    assert_is_the_recurrence(given, first, delta, chunk=16, segments=segments(first, cuts))


@pytest.mark.wide_except("0.001-32-additive")
@pytest.mark.parametrize("delta", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("chunk", [32, 64])
@pytest.mark.parametrize("strength", [1e-3, 8.0])
def test_longer_chunks(delta: bool, chunk: int, strength: float) -> None:
    given = inputs(149, strength, Sizes(1, 1, 1, 16, 16), torch.float16)
    assert_is_the_recurrence(given, firsts(149, []), delta, chunk=chunk)


@pytest.mark.wide
@pytest.mark.parametrize("delta", KINDS.values(), ids=KINDS)
def test_documents_may_begin_at_every_position(delta: bool) -> None:
    """Each sample has another position, and two of them another beside it."""
    first = firsts(33, *([start] for start in (0, 1, 15, 16, 17, 32)), [20, 21])
    given = inputs(33, 0.1, Sizes(len(first), 1, 1, 4, 3), torch.bfloat16)
    assert_is_the_recurrence(given, first, delta, chunk=16, segments=segments(first, [0, 33]))


@pytest.mark.wide_except("additive")
@pytest.mark.parametrize("delta", KINDS.values(), ids=KINDS)
def test_cuts_between_chunks_change_no_bit(delta: bool) -> None:
    first, given = firsts(64, [5, 40]), inputs(64, 0.1, Sizes(1, 1, 1, 16, 16), torch.bfloat16)
    how = {"delta": delta, "chunk": 16}
    output, last = recurrence(*given, **how, segments=segments(first, [0, 64]))
    expected = with_gradients(given, output)
    found, end = recurrence(*given, **how, segments=segments(first, [0, 16, 64]))
    assert_bits_equal(end, last)
    for ours, theirs in zip(with_gradients(given, found), expected, strict=True):
        assert_bits_equal(ours, theirs)


@pytest.mark.parametrize("delta", KINDS.values(), ids=KINDS)
def test_segments_of_other_ranks_pass_states_on(delta: bool) -> None:
    """Forward with a scan is the reference, which has maps of segments; the kernels go back."""
    first, given = firsts(70, [40]), inputs(70, 0.1, Sizes(1, 1, 1, 16, 8), torch.bfloat16)
    own = segments(first, [0, 21, 70])
    assert_is_the_recurrence(given, first, delta, chunk=16, segments=own, scan=InOneProcess([0, 1]))


def test_keys_that_are_equal_do_not_overflow() -> None:
    """Powers of the system of such a chunk are large, though its solution is not. Gradients of decays nearly vanish."""
    query, key, value, decay, step = inputs(64, 1e-4, Sizes(1, 1, 1, 16, 16), torch.bfloat16)
    same = key[:1].detach().expand(64, -1, -1, -1).contiguous().requires_grad_()
    given = [query, same, value, decay, torch.ones_like(step).requires_grad_()]
    assert_is_the_recurrence(given, firsts(64, []), True, bound=1e-2, chunk=64)


@pytest.mark.parametrize("delta", KINDS.values(), ids=KINDS)
def test_a_state_enters_and_chunks_of_kernels_have_at_most_64_tokens(delta: bool) -> None:
    given = [each.detach() for each in inputs(160, 0.1, Sizes(1, 1, 1, 16, 16), torch.bfloat16)]
    whole, last = recurrence(*given, delta=delta, chunk=128)
    _, state = recurrence(*(each[:128] for each in given), delta=delta, chunk=128)
    own = segments(firsts(160, []), [0, 128, 160])[1:]
    output, end = recurrence(*(each[128:] for each in given), delta=delta, chunk=64, segments=own, state=state)
    assert_bits_equal(output, whole[128:])
    assert_bits_equal(end, last)


def test_rounding_to_tf32_stays_within_that_of_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round as tensor cores do, which the interpreter does not."""
    product = stock.InterpreterBuilder.create_dot

    def rounded(builder: Any, left: Any, right: Any, total: Any, precision: Any, *rest: Any) -> Any:
        parts = [stock.TensorHandle(_tf32(each.data), each.dtype.scalar) for each in (left, right)]
        return product(builder, *parts, total, precision, *rest)

    monkeypatch.setattr(stock.InterpreterBuilder, "create_dot", rounded)
    given = inputs(128, 0.05, Sizes(1, 1, 1, 16, 16), torch.bfloat16)
    exact, first = [each.detach().double().requires_grad_() for each in given], firsts(128, [])
    output, _ = recurrence(*given, delta=True, chunk=64)
    expected, _ = recurrence_in_torch(*exact, first, delta=True)
    for ours, theirs in zip(with_gradients(given, output), with_gradients(exact, expected), strict=True):
        error = (ours - theirs).norm() / theirs.norm()
        assert 1e-5 <= error <= 4e-3


def _tf32(values: np.ndarray) -> np.ndarray:
    """Round fp32 to a mantissa of 10 bits, to nearest and ties away from zero."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFF_E000)).view(np.float32)


def test_what_kernels_do_not_compute_is_left_to_the_reference() -> None:
    """fp32, keys that are too wide, chunks that are no power of two, and what the choice leaves."""
    usual, half = Sizes(1, 1, 1, 4, 4), torch.bfloat16
    for dtype, sizes, chunk in (
        (torch.float32, usual, 16),
        (half, Sizes(1, 1, 1, recurrence_segment.WIDEST + 1, 4), 16),
        (half, usual, 8),
        (half, usual, 48),
        (half, usual, 96),
    ):
        with only_programs():  # a kernel would write nothing
            output, _ = recurrence(*inputs(9, 0.1, sizes, dtype), delta=True, chunk=chunk)
        assert output.isfinite().all()
    use(Kernels("triton", to_reference=("recurrence",)))
    with only_programs():
        output, _ = recurrence(*inputs(9, 0.1, usual, half), delta=True, chunk=16)
    assert output.isfinite().all()

"""Dropout: the kernel equals the reference bit for bit, and both equal numpy's generator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite_kernels import dropout_kernels
from megalite_kernels.dropout import drop, kept_reference
from megalite_kernels.dropout_kernels import COUNTERS
from megalite_kernels.dropout_mask import GROUP, LEVELS, DropoutMask
from megalite_kernels.implementation import Kernels, use
from tests.harness.close import assert_bits_equal
from tests.kernels.cells import cells, named
from tests.kernels.interpreter import only_programs

MASK = DropoutMask(0.3, seed=2**32 - 1, layer=5, site=3, samples=(2**40, 7, 8), rows=(range(3, 5), range(9, 16)))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def dropped(input: Tensor, gradient: Tensor, mask: DropoutMask, dimension: int) -> tuple[Tensor, Tensor]:
    input = input.detach().requires_grad_()
    output = drop(input, mask, dimension=dimension)
    return output.detach(), torch.autograd.grad(output, input, gradient)[0]


def check(input: Tensor, gradient: Tensor, dimension: int, mask: DropoutMask = MASK) -> None:
    found = dropped(input, gradient, mask, dimension)
    use(Kernels("reference"))
    expected = dropped(input, gradient, mask, dimension)
    use(Kernels("triton"))
    for ours, reference in zip(found, expected, strict=True):
        assert ours.dtype == reference.dtype == input.dtype
        assert_bits_equal(ours, reference, "dropped")


@pytest.mark.wide_except("16-torch.float32", "80-torch.bfloat16")
@pytest.mark.parametrize(
    ("width", "dtype"),
    cells(
        named([GROUP, 5 * GROUP, COUNTERS * GROUP // 2]),
        named([torch.float32, torch.bfloat16, torch.float16]),
        kept=lambda width, dtype: width == dtype,
    ),
)
def test_the_kernel_drops_what_the_reference_drops(width: int, dtype: torch.dtype) -> None:
    """Compare two runs of rows, over one program and several, with the samples as second and first dimension."""
    check(numbers(9, 3, width).to(dtype), numbers(9, 3, width).to(dtype), 1)
    check(numbers(3, 9, width).to(dtype), numbers(3, 9, width).to(dtype), 0)


def test_any_strides_and_widths_may_be() -> None:
    check(numbers(3, 9, 32).transpose(0, 1), numbers(1, 1, 1).expand(9, 3, 32), 1)
    check(numbers(9, 3, 7), numbers(9, 3, 7), 1)
    check(numbers(0, 3, 32), numbers(0, 3, 32), 1, DropoutMask(0.3, 1, 0, 0, (1, 2, 3), ()))


def test_consecutive_samples_are_one_launch_without_a_tensor_of_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of them would be copied to the GPU, which waits in the middle of a forward."""
    launched: list[tuple[object, ...]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            return lambda *arguments: launched.append((grid[1], *arguments))

    monkeypatch.setattr(dropout_kernels, "_drop", Recorder())
    drop(numbers(4, 3, 32), DropoutMask(0.3, 1, 2, 3, (2**40, 2**40 + 1, 2**40 + 2), (range(4),)), dimension=1)
    ((samples, input, output, first, *numbers_alone),) = launched
    assert isinstance(input, Tensor)
    assert isinstance(output, Tensor)
    assert not any(isinstance(argument, Tensor) for argument in (first, *numbers_alone))
    assert (samples, first) == (3, 2**40)


def test_the_numbers_are_numpys() -> None:
    """The stream of a key and a counter, from the beginning of the sample's tensor."""
    kept = kept_reference(torch.Size((9, 3, 24)), 1, MASK)
    for number, sample in enumerate(MASK.samples):
        counter, key = np.array([0, sample, 5, 3], np.uint64), np.array([2**32 - 1, 0], np.uint64)
        stream = np.random.Philox(counter=counter, key=key).random_raw(16 * 24 // 4)
        drawn = torch.tensor([word >> shift & 0xFFFF for word in stream.tolist() for shift in (0, 16, 32, 48)])
        expected = (drawn >= round(0.3 * 65536)).view(16, 24)[[3, 4, *range(9, 16)]]
        assert torch.equal(kept[:, number].bool(), expected)


@pytest.mark.parametrize("probability", [1e-7, 0.5, 1 - 1e-9])
def test_every_probability_below_one_keeps_the_mean(probability: float) -> None:
    mask = DropoutMask(probability, 1, 2, 3, (4,), (range(4096),))
    kept = kept_reference(torch.Size((4096, 1, 256)), 1, mask).double().mean().item()
    assert kept == pytest.approx((LEVELS - mask.threshold) / LEVELS, abs=2e-3)
    assert mask.scale * (LEVELS - mask.threshold) / LEVELS == 1.0


def test_elements_lie_beyond_2_to_the_31() -> None:
    """Memory is taken only where it is touched."""
    torch.use_deterministic_algorithms(False)  # fresh memory is left alone
    rows, width = 2**15 + 1, 2**16
    values = torch.empty(rows, 1, width, dtype=torch.bfloat16)
    values[-1] = numbers(1, width).bfloat16()
    mask = DropoutMask(0.3, 1, 2, 3, (4,), (range(rows),))
    with only_programs(-1):
        found = drop(values, mask, dimension=1)[-1, 0, -COUNTERS * GROUP :]
    last = DropoutMask(0.3, 1, 2, 3, (4,), (range(rows - 1, rows),))
    assert torch.equal(found, drop(values[-1:].clone(), last, dimension=1)[0, 0, -COUNTERS * GROUP :])

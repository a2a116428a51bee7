"""The kernels of the cross entropy against torch's in float64; ranks are slices of the columns."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels import cross_entropy
from megalite_kernels.cross_entropy import combined, gradient_, losses, statistics
from megalite_kernels.implementation import Kernels, use
from megalite_kernels.loss_options import Columns, LossOptions
from tests.kernels.cells import cells, named
from tests.kernels.interpreter import only_programs

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # the log of what a rank of padding has

# Of the norm of the error. Statistics come from the logits as they are, in fp32, whatever their dtype.
TOLERANCE = {torch.float32: 5e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
EVERYTHING = LossOptions(label_smoothing=0.1, z_loss=1e-2, soft_cap=3.0)
TERMS = {
    "plain": LossOptions(),
    "smoothed": LossOptions(label_smoothing=0.1),
    "z": LossOptions(z_loss=1e-2),
    "capped": LossOptions(soft_cap=3.0),
    "everything": EVERYTHING,
}
# (tokens, entries, columns with the padding, ranks): one column, odd ones, several to a tile, all in one tile, tiles
# that end with the row and before it, ranks that hold some padding or nothing else
SHAPES = [(1, 1, 1, 1), (3, 41, 41, 1), (4, 50, 64, 4), (2, 5, 16, 4), (3, 2048, 2048, 1), (2, 8192, 8192, 1)]
SHAPES += [(2, 5000, 5008, 2)]


def inputs(tokens: int, vocab_size: int, padded: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits whose padding would win every softmax, labels, the first at the borders, and weights of the tokens."""
    generator = torch.Generator().manual_seed(tokens + padded)
    logits = torch.randn(tokens, padded, generator=generator).mul_(3.0)
    logits[:, vocab_size:] = 50.0
    labels = torch.randint(vocab_size, (tokens,), generator=generator)
    borders = torch.tensor([vocab_size - 1, 0, vocab_size // 2])[:tokens]
    labels[: len(borders)] = borders
    return logits.to(dtype), labels, torch.rand(tokens, generator=generator)


def ours(
    logits: Tensor, labels: Tensor, weights: Tensor, vocab_size: int, ranks: int, options: LossOptions
) -> list[Tensor]:
    """Losses and gradient, each rank by itself."""
    parts = [part.contiguous() for part in logits.chunk(ranks, dim=1)]
    columns = [Columns.of_rank(rank, parts[0].shape[1], vocab_size) for rank in range(ranks)]
    found = combined(torch.stack([statistics(p, labels, c, options) for p, c in zip(parts, columns, strict=True)]))
    for part, own in zip(parts, columns, strict=True):
        gradient_(part, labels, found[0], weights, own, options)
    return [losses(found, vocab_size, options), torch.cat(parts, dim=1)]


def exact(logits: Tensor, labels: Tensor, weights: Tensor, vocab_size: int, options: LossOptions) -> list[Tensor]:
    """torch's, in float64."""
    wide = logits.double().clone().requires_grad_()
    x = wide[:, :vocab_size]
    if options.soft_cap is not None:
        x = torch.tanh(x / options.soft_cap) * options.soft_cap
    found = F.cross_entropy(x, labels, reduction="none", label_smoothing=options.label_smoothing)
    found = found + options.z_loss * torch.logsumexp(x, dim=1) ** 2
    (gradient,) = torch.autograd.grad((found * weights.double()).sum(), wide)
    return [found.detach(), gradient]


def assert_near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert (found.double() - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize(
    ("dtype", "shape", "options"),
    cells(
        named([*TOLERANCE], lambda dtype: str(dtype)[6:]),
        named(SHAPES, lambda shape: "-".join(map(str, shape))),
        TERMS,
        kept=lambda dtype, shape, options: (shape + options) % 3 == dtype,
    ),
)
def test_losses_and_gradient_are_torchs(
    dtype: torch.dtype, shape: tuple[int, int, int, int], options: LossOptions
) -> None:
    """A gradient's numbers are differences of ones near 1, and capped logits are exact to some 1e-7 of the cap: so
    four times the tolerance in fp32.
    """
    tokens, vocab_size, padded, ranks = shape
    logits, labels, weights = inputs(tokens, vocab_size, padded, dtype)
    wanted = exact(logits, labels, weights, vocab_size, options)
    found = ours(logits, labels, weights, vocab_size, ranks, options)
    assert [part.dtype for part in found] == [torch.float32, dtype]
    if vocab_size == 1:  # the only choice is sure
        terms_left = options.z_loss * wanted[0].norm()
        assert (found[0].double() - wanted[0]).abs().max() <= 1e-6 + 1e-6 * terms_left
        assert (found[1].double() - wanted[1]).abs().max() <= 1e-6 + TOLERANCE[dtype]
        return
    assert_near(found[0], wanted[0], 4 * TOLERANCE[torch.float32])
    assert_near(found[1], wanted[1], TOLERANCE[dtype] * (4 if dtype == torch.float32 else 1))
    assert not found[1][:, vocab_size:].any()


@pytest.mark.parametrize("options", [LossOptions(), EVERYTHING], ids=["plain", "everything"])
def test_the_reference_gives_the_same_in_float64(options: LossOptions) -> None:
    """In one chunk and in several, of which some are cut short."""
    logits, labels, weights = inputs(5, 37, 40, torch.float64)
    wanted = exact(logits, labels, weights, 37, options)
    for chunk in (cross_entropy.CPU_CHUNK_ELEMENTS, 2 * 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cross_entropy, "CPU_CHUNK_ELEMENTS", chunk)
            found = ours(logits, labels, weights.double(), 37, 2, options)
        for part, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-12)


def test_each_statistic_is_the_references() -> None:
    logits, labels, _ = inputs(3, 20, 32, torch.float32)
    for rank, options in itertools.product(range(4), (LossOptions(), EVERYTHING)):
        part, columns = logits[:, 8 * rank : 8 * rank + 8], Columns.of_rank(rank, 8, 20)
        found = statistics(part, labels, columns, options)
        use(Kernels("reference"))
        wanted = statistics(part, labels, columns, options)
        use(Kernels("triton"))
        assert found.shape == wanted.shape == (3 if options.label_smoothing else 2, 3)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        assert bool((found[0] == -math.inf).all()) is (rank == 3)


def test_tokens_that_do_not_count_have_no_gradient() -> None:
    logits, labels, weights = inputs(3, 50, 64, torch.bfloat16)
    _, gradient = ours(logits, labels, torch.zeros_like(weights), 50, 2, EVERYTHING)
    assert not gradient.any()


@pytest.mark.parametrize("options", [LossOptions(), EVERYTHING], ids=["plain", "everything"])
def test_no_tokens(options: LossOptions) -> None:
    logits, labels, weights = (part[:0] for part in inputs(3, 50, 64, torch.bfloat16))
    found = ours(logits, labels, weights, 50, 2, options)
    assert [part.shape for part in found] == [(0,), (0, 64)]


@pytest.mark.parametrize(
    "view",
    [lambda whole: whole[1::2, 8:48], lambda whole: whole[:, 3:43], lambda whole: whole[:1, :40].expand(4, 40)],
    ids=["steps", "slice", "one row"],
)
def test_strides_change_no_bit(view: object) -> None:
    """Vary strides of logits, labels and weights; memory between the rows must not change."""
    whole, labels, weights = inputs(8, 64, 64, torch.float32)
    part = view(whole)  # type: ignore[operator]
    ids = torch.stack([labels.clamp(max=39), labels], dim=1)[: len(part), 0]
    scales = weights[:1].expand(len(part))
    wanted = ours(part.contiguous(), ids.contiguous(), scales.contiguous(), 40, 1, EVERYTHING)
    found = statistics(part, ids, Columns(0, 40, 40), EVERYTHING)
    assert torch.equal(losses(combined(found.unsqueeze(0)), 40, EVERYTHING), wanted[0])
    if part.stride(0):
        before = whole.clone()
        gradient_(part, ids, combined(found.unsqueeze(0))[0], scales, Columns(0, 40, 40), EVERYTHING)
        assert torch.equal(part, wanted[1])
        view(before).copy_(part)  # type: ignore[operator]
        assert torch.equal(whole, before)


def test_the_elements_of_a_row_may_stand_apart() -> None:
    logits, labels, _ = inputs(4, 40, 40, torch.float32)
    apart = logits.t().contiguous().t()
    columns = Columns(0, 40, 40)
    assert torch.equal(
        statistics(apart, labels, columns, LossOptions()), statistics(logits, labels, columns, LossOptions())
    )


def test_two_runs_give_the_same_bits() -> None:
    parts = inputs(2, 5000, 5008, torch.bfloat16)
    first, second = (ours(*parts, 5000, 2, EVERYTHING) for _ in range(2))
    assert all(torch.equal(once, again) for once, again in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore:overflow")  # in lanes behind the last column
def test_large_logits_overflow_nothing() -> None:
    logits, labels, weights = inputs(3, 41, 41, torch.float32)
    for shift in (-1e4, 1e4):
        wanted = exact(logits + shift, labels, weights, 41, LossOptions())
        found = ours(logits + shift, labels, weights, 41, 1, LossOptions())
        assert (found[0].double() - wanted[0]).abs().max() <= 4e-3  # of numbers around 1e4, in fp32
        assert_near(found[1], wanted[1], 1e-2)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_an_infinite_logit_is_not_hidden() -> None:
    logits, labels, _ = inputs(2, 41, 41, torch.float32)
    logits[0, 7] = math.inf
    found = statistics(logits, labels, Columns(0, 41, 41), LossOptions())
    assert found[0].isfinite().tolist() == [False, True]


def test_rows_lie_beyond_2_to_the_31_elements() -> None:
    """Memory is taken only where it is touched."""
    torch.use_deterministic_algorithms(False)  # fresh memory is left alone
    stride = 2**30 + 64
    far = torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((3, 64), (stride, 1))
    near, labels, weights = inputs(3, 64, 64, torch.bfloat16)
    far.copy_(near)
    columns = Columns(0, 64, 64)
    found, wanted = (statistics(logits, labels, columns, LossOptions()) for logits in (far, near))
    assert torch.equal(found, wanted)
    for logits in (far, near):
        gradient_(logits, labels, found[0], weights, columns, LossOptions())
    assert torch.equal(far, near)
    rows = 2**31 // 64 + 16
    with only_programs(-1):
        many = statistics(near[:1].expand(rows, 64), labels[:1].expand(rows), columns, EVERYTHING)
    assert torch.equal(many[:, -1], statistics(near[:1], labels[:1], columns, EVERYTHING)[:, 0])

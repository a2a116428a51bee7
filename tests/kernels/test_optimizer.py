"""AdamW's and SGD's kernels against torch's optimizers in float64, each step from what was kept before it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megalite_kernels import optimizer
from megalite_kernels.implementation import Kernels, use
from megalite_kernels.master_weights import joined, split_
from megalite_kernels.moments import Quantized
from megalite_kernels.optimizer import update_
from megalite_kernels.updates import SGD, AdamW, Flat
from tests.kernels.cells import cells, named
from tests.kernels.interpreter import nan_is_written, only_programs

# Of the norm of the error: 8 and 2 roundings to nearest of the dtype.
TOLERANCE = {torch.float32: 5e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
ADAMW = AdamW(rate=0.3, decay=0.1, beta1=0.9, beta2=0.95, epsilon=1e-6, step=1, factor=0.37)
SIZES = [0, 1, 15, 64, 2048, 5000]
MASTERS = {
    "fp32": (torch.float32, None),
    "bf16, fp32 masters": (torch.bfloat16, torch.float32),
    "fp16, fp32 masters": (torch.float16, torch.float32),
    "bf16, fp16 masters": (torch.bfloat16, torch.float16),
    "bf16, remainders": (torch.bfloat16, torch.int16),
}


@dataclass
class Drawn:
    """Weights, gradients and moments."""

    flat: Flat
    average: Tensor
    squares: Tensor

    @property
    def weights(self) -> Tensor:
        """In float64, those that the arithmetic is on."""
        if self.flat.master is not None and self.flat.master.dtype == torch.int16:
            return joined(self.flat.parameters, self.flat.master).double()
        return (self.flat.parameters if self.flat.master is None else self.flat.master).double()

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (*self.flat[:3], self.average, self.squares) if tensor is not None]


def drawn(
    elements: int,
    masters: str = "fp32",
    gradients: torch.dtype = torch.float32,
    average: torch.dtype = torch.float32,
    squares: torch.dtype = torch.float32,
) -> Drawn:
    generator = torch.Generator().manual_seed(elements)
    weights, gradient, mean = (torch.randn(elements, generator=generator) for _ in range(3))
    dtype, kept = MASTERS[masters]
    parameters, master = weights.to(dtype), None if kept is None else weights.to(kept)
    if kept == torch.int16:
        master = torch.empty_like(parameters, dtype=torch.int16)
        split_(weights, parameters, master)
    flat = Flat(parameters, gradient.to(gradients), master)
    return Drawn(flat, mean.to(average), mean.square().mul_(0.5).to(squares))


def stepped_by_torch(before: Drawn, by: AdamW | SGD) -> list[Tensor]:
    """Weights and moments, in float64, after one step of torch's."""
    weights = before.weights.requires_grad_()
    weights.grad = before.flat.gradients.double() * by.factor
    made: torch.optim.Optimizer
    if isinstance(by, AdamW):
        betas = (by.beta1, by.beta2)
        made = torch.optim.AdamW([weights], lr=by.rate, betas=betas, eps=by.epsilon, weight_decay=by.decay)
        moments = {"exp_avg": before.average.double(), "exp_avg_sq": before.squares.double()}
        made.state[weights] = moments | {"step": torch.tensor(by.step - 1.0)}
    else:
        made = torch.optim.SGD([weights], lr=by.rate, momentum=by.momentum, weight_decay=by.decay)
        moments = {"momentum_buffer": before.average.double()} if by.momentum else {}
        made.state[weights] = dict(moments)
    made.step()
    return [weights.detach(), *(made.state[weights][name] for name in moments)]


def check(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert (found.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm()


def check_steps(state: Drawn, by: AdamW | SGD, steps: int = 3) -> None:
    for step in range(1, steps + 1):
        exact = stepped_by_torch(state, by._replace(step=step) if isinstance(by, AdamW) else by)
        if isinstance(by, AdamW):
            update_(state.flat, [state.average, state.squares], by._replace(step=step))
        else:
            update_(state.flat, [state.average], by)
        kept = state.flat.master if state.flat.master is not None else state.flat.parameters
        check(state.weights, exact[0], torch.float32 if kept.dtype == torch.int16 else kept.dtype)
        for moment, wanted in zip((state.average, state.squares), exact[1:], strict=False):
            check(moment, wanted, moment.dtype)
        if state.flat.master is not None:
            check(state.flat.parameters, state.weights, state.flat.parameters.dtype)
        state.flat.gradients.neg_()


@pytest.mark.parametrize("elements", SIZES)
def test_adamw_is_torchs(elements: int) -> None:
    check_steps(drawn(elements), ADAMW)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("elements", SIZES)
def test_sgd_is_torchs(elements: int, momentum: float) -> None:
    check_steps(drawn(elements), SGD(rate=0.3, decay=0.1, momentum=momentum, factor=0.37))


@pytest.mark.parametrize("masters", MASTERS)
def test_parameters_are_written_beside_their_masters(masters: str) -> None:
    check_steps(drawn(700, masters, gradients=torch.bfloat16), ADAMW)
    check_steps(drawn(700, masters), SGD(rate=0.3, decay=0.1, momentum=0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_moments_are_rounded_and_no_more(dtype: torch.dtype) -> None:
    check_steps(drawn(700, average=dtype, squares=dtype), ADAMW)
    check_steps(drawn(700, average=dtype), SGD(rate=0.3, decay=0.1, momentum=0.5))


FORMATS = list(itertools.product([torch.int8, torch.float8_e4m3fn], repeat=2))


def quantized(state: Drawn, formats: tuple[torch.dtype, torch.dtype]) -> tuple[Quantized, Quantized]:
    """The moments in 8 bits; those of `state` become their values."""
    found = []
    for number, (moment, format) in enumerate(zip((state.average, state.squares), formats, strict=True)):
        found.append(Quantized.zeros(moment, format, root=number == 1))
        found[-1].write(moment)
        moment.copy_(found[-1].read(0, len(moment)))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("elements", "formats"),
    cells(named([64, 1000]), named(FORMATS), kept=lambda elements, formats: elements == formats % 2),
)
def test_moments_in_8_bits_are_rounded_and_no_more(elements: int, formats: tuple[torch.dtype, torch.dtype]) -> None:
    """Weights are as exact as ever. Each moment is one of the two codes around what it should be."""
    state = drawn(elements)
    moments = quantized(state, formats)
    exact = stepped_by_torch(state, ADAMW)
    update_(state.flat, moments, ADAMW)
    check(state.weights, exact[0], torch.float32)
    for moment, wanted in zip(moments, exact[1:], strict=True):
        found = moment.read(0, elements).double()
        if moment.root:
            found, wanted = found.sqrt(), wanted.sqrt()
        largest = wanted.abs().max()
        step = largest / 127 if moment.codes.dtype == torch.int8 else torch.maximum(wanted.abs() / 8, largest / 2**17)
        assert ((found - wanted).abs() <= 1.001 * step).all()


@pytest.mark.parametrize("formats", cells(named(FORMATS), kept=lambda formats: formats in (1, 2)))
def test_the_reference_has_the_kernels_codes(
    formats: tuple[torch.dtype, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over several chunks, and of a part that draws what the whole would."""
    monkeypatch.setattr(optimizer.launch, "chunk_elements", lambda _: 512)
    found = []
    for choice, part in (("triton", 0), ("reference", 0), ("triton", 512)):
        use(Kernels(choice))  # type: ignore[arg-type]
        state = drawn(1300)
        state.flat.gradients[::2] *= 1e-6  # less than the least code
        flat = Flat(state.flat.parameters[part:], state.flat.gradients[part:], first=64 + part)
        average, squares = (
            Quantized.zeros(torch.empty(1300 - part), format, root=number == 1) for number, format in enumerate(formats)
        )
        for step in (1, 2):
            update_(flat, [average, squares], ADAMW._replace(step=step, seed=8 + 2 * step))
        update_(flat, [average], SGD(0.1, 0.1, 0.9, seed=14))
        found.append([tensor[-700:] for tensor in (average.bytes, squares.bytes)])
    for ours, theirs, parts in zip(*found, strict=True):
        assert (ours != theirs).sum() <= 3  # where fp32 rounds the averages apart
        assert torch.equal(ours, parts)


@pytest.mark.parametrize(
    ("format", "magnitude"),
    cells(
        named([torch.int8, torch.float8_e4m3fn]),
        named([1.0, 1e-13, 1e-16, 1e-18, 1e-25]),
        kept=lambda format, magnitude: format == magnitude % 2,
    ),
)
def test_squares_in_8_bits_come_back_and_none_is_lost(format: torch.dtype, magnitude: float) -> None:
    """Check that no positive number becomes zero in blocks from 1e-13 on; blocks of much smaller numbers are zeros."""
    moment = Quantized.zeros(torch.empty(2000), format, root=True)
    generator = torch.Generator().manual_seed(1)
    roots = torch.randn(2000, generator=generator).mul_(magnitude).abs_()
    roots[::7] *= 1e-7
    roots[100:105] = 0.0
    squares = roots.square()
    squares[1::7] = 1.4e-45  # the least number above zero
    for seed in (None, 2):
        moment.set(squares, 0, seed=seed)
        values = moment.read(0, 2000)
        if magnitude >= 1e-13:
            assert torch.equal(values > 0.0, squares > 0.0)
        elif magnitude < 1e-20:
            assert not values.any()
        again = Quantized.zeros(torch.empty(2000), format, root=True)
        again.write(values)
        assert torch.equal(again.bytes, moment.bytes)
        assert torch.equal(again.scales, moment.scales)
        assert torch.equal(moment.read(300, 777), values[300:777])


def test_an_average_that_grows_in_small_steps_grows_in_8_bits() -> None:
    """Each step is a tenth of the distance of two codes, which rounding to nearest would lose each time."""
    use(Kernels("reference"))
    flat = Flat(torch.zeros(256), torch.full((256,), 1e-3))
    flat.gradients[0] = 1.0
    average, squares = (Quantized.zeros(torch.empty(256), torch.int8, root=root) for root in (False, True))
    by = AdamW(rate=0.0, decay=0.0, beta1=0.99, beta2=0.999, epsilon=1e-8, step=1)
    for step in range(1, 101):
        update_(flat, [average, squares], by._replace(step=step, seed=2 * step))
    exact = 1e-3 * (1.0 - 0.99**100)
    assert average.read(1, 256).mean().item() == pytest.approx(exact, rel=0.3)


def test_sgd_may_keep_nothing() -> None:
    state, other = drawn(300), drawn(300)
    update_(state.flat, [], SGD(0.3, 0.1, 0.0))
    update_(other.flat, [other.average], SGD(0.3, 0.1, 0.0))
    assert torch.equal(state.flat.parameters, other.flat.parameters)


def test_kernels_and_reference_agree_to_the_rounding_of_fp32() -> None:
    """Compare the kernel with the reference; the next test compares the reference with torch, in float64."""
    states = [drawn(3000), drawn(3000)]
    for choice, state in zip(("triton", "reference"), states, strict=True):
        use(Kernels(choice))
        for step in range(1, 6):
            update_(state.flat, [state.average, state.squares], ADAMW._replace(step=step))
    for ours, theirs in zip(states[0].tensors(), states[1].tensors(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)


def test_float64_is_torchs_to_its_own_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer.launch, "chunk_elements", lambda _: 50)
    state = drawn(130)
    wide = Drawn(Flat(*(t.double() for t in state.flat[:2])), state.average.double(), state.squares.double())
    for step in range(1, 4):
        by = ADAMW._replace(step=step)
        exact = stepped_by_torch(wide, by)
        update_(wide.flat, [wide.average, wide.squares], by)
        for found, wanted in zip((wide.flat.parameters, wide.average, wide.squares), exact, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_remainders_change_no_bit() -> None:
    """Compare weights, parameters and moments, for the kernel and for the reference."""
    for choice in ("triton", "reference"):
        use(Kernels(choice))  # type: ignore[arg-type]
        states = [drawn(5000, "bf16, fp32 masters"), drawn(5000, "bf16, remainders")]
        with nan_is_written():  # a remainder may be the largest number
            for step, state in itertools.product(range(1, 5), states):
                update_(state.flat, [state.average, state.squares], ADAMW._replace(step=step))
                update_(state.flat, [state.average], SGD(0.1, 0.1, 0.9))
        for ours, theirs in zip(*([s.weights, s.flat.parameters, s.average, s.squares] for s in states), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("masters", ["bf16, fp32 masters", "bf16, remainders"])
def test_a_weight_that_is_no_number_stays_none(masters: str) -> None:
    """Also where rounding its bits would make one of it."""
    state = drawn(64, masters)
    assert state.flat.master is not None
    if masters == "bf16, remainders":
        state.flat.parameters[5:8:2] = torch.nan
    else:
        bits = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32)
        state.flat.master[5:8:2] = bits.view(torch.float32)
    with nan_is_written():
        update_(state.flat, [state.average, state.squares], ADAMW)
    lost = torch.zeros(64, dtype=torch.bool)
    lost[5:8:2] = True
    assert torch.equal(state.flat.parameters.isnan(), lost)
    assert torch.equal(state.weights.isnan(), lost)


@pytest.mark.parametrize("choice", ["triton", "reference"])
def test_a_slice_is_updated_alone_and_twice_the_same(choice: str) -> None:
    use(Kernels(choice))  # type: ignore[arg-type]
    whole, again, apart = (drawn(1000, "bf16, fp32 masters") for _ in range(3))
    for state in (whole, again):
        flat = Flat(*(tensor[33:870] for tensor in state.flat[:3] if tensor is not None))
        update_(flat, [state.average[33:870], state.squares[33:870]], ADAMW)
    update_(apart.flat, [apart.average, apart.squares], ADAMW)
    untouched = drawn(1000, "bf16, fp32 masters")
    for ours, twice, all_of_it, before in zip(*(s.tensors() for s in (whole, again, apart, untouched)), strict=True):
        assert torch.equal(ours, twice)
        assert torch.equal(ours[33:870], all_of_it[33:870])
        assert torch.equal(ours[:33], before[:33])
        assert torch.equal(ours[870:], before[870:])


def test_what_is_not_flat_is_refused() -> None:
    state = drawn(64)
    for flat in (
        Flat(state.flat.parameters[::2], state.flat.gradients[::2]),
        Flat(state.flat.parameters, state.flat.gradients[:63]),
        Flat(state.flat.parameters.view(8, 8), state.flat.gradients.view(8, 8)),
    ):
        with pytest.raises(ValueError, match="flat, contiguous tensors"):
            update_(flat, [state.average[: len(flat.parameters)], state.squares[: len(flat.parameters)]], ADAMW)


def test_elements_lie_beyond_2_to_the_31() -> None:
    """Memory is taken only where it is touched: the last tile of each tensor."""
    torch.use_deterministic_algorithms(False)  # fresh memory is left alone
    elements, last = 2**31 + 4096, slice(-2048, None)
    near = drawn(2048, "bf16, remainders", torch.bfloat16, torch.bfloat16, torch.bfloat16)
    far = [torch.empty(elements, dtype=tensor.dtype) for tensor in near.tensors()]
    for distant, close in zip(far, near.tensors(), strict=True):
        distant[last] = close
    parameters, gradients, master, average, squares = far
    with only_programs(-1):
        update_(Flat(parameters, gradients, master), [average, squares], ADAMW)
    update_(near.flat, [near.average, near.squares], ADAMW)
    for distant, close in zip(far, near.tensors(), strict=True):
        assert torch.equal(distant[last], close)

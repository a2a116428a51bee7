"""The self-test, which runs on GPUs: here that it finds what is wrong, and knows what an operation reads and writes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite_kernels import cases, measure, selftest
from megalite_kernels.case import Case
from megalite_kernels.moments import Quantized
from megalite_kernels.norm import norm
from megalite_kernels.updates import Flat, Moment

PLAIN = next(case for case in cases.cases() if case.name == "rms_norm 128 float32")
UPDATES = [case for case in cases.cases() if case.name.startswith(("adamw", "sgd"))]
CLI = ["--device", "cpu", "--only"]


def broken(kind: str) -> Case:
    """A norm whose kernels are wrong."""
    runs = itertools.count()

    def run(input: Tensor, weight: Tensor) -> Tensor:
        output = norm(input, weight, None, 1e-5)
        if input.dtype == torch.float64:
            return output
        if kind == "output":
            return output * (1 + 1e-5)
        if kind == "gradient":
            return output + (weight - weight.detach()) * 1e-3
        if kind == "one of two runs":
            return output + 1e-8 * (next(runs) % 2)
        if kind == "not a number":
            return torch.where(torch.arange(output.numel()).view_as(output) == 3, torch.nan, output)
        raise RuntimeError("it does not compile\nin many lines")

    return replace(PLAIN, name="a broken norm", run=run)


def test_what_is_right_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest.main([*CLI, "rms_norm 128"]) == 0
    out = capsys.readouterr().out
    assert "rms_norm 128 float16" in out
    assert "bfloat16" not in out
    assert "WRONG" not in out
    assert out.endswith("selftest: 2 operations are right\n")


@pytest.mark.parametrize("kind", ["output", "gradient", "one of two runs", "not a number", "an error"])
def test_what_is_wrong_is_found(kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cases, "cases", lambda: iter([PLAIN, broken(kind)]))
    assert selftest.main([*CLI, "norm"]) == selftest.EXIT_WRONG
    right, wrong, verdict = capsys.readouterr().out.splitlines()[1:]
    assert "WRONG" not in right
    assert wrong.startswith("a broken norm ")
    assert "<- WRONG" in wrong
    assert wrong.endswith("RuntimeError: it does not compile") == (kind == "an error")
    assert verdict == "selftest: 1 of 2 operations are WRONG"


def test_what_is_written_over_is_a_copy() -> None:
    """Each run, and the one in float64, starts from the same inputs."""
    case = replace(PLAIN, make_inputs=lambda tokens, device: [torch.ones(tokens, 8)], run=lambda x: x.mul_(3.0))
    (numbers,) = selftest.check_numbers([case], "cpu")
    assert numbers.right


def test_a_tolerance_can_be_its_own() -> None:
    case = broken("output")
    assert [numbers.right for numbers in selftest.check_numbers([case, replace(case, tolerance=1e-4)], "cpu")] == [
        False,
        True,
    ]


def test_nothing_to_test_on_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert selftest.main([]) == selftest.EXIT_NOTHING_TO_TEST
    assert "finds no GPU" in capsys.readouterr().err
    assert selftest.main([*CLI, "no such operation"]) == selftest.EXIT_WRONG


def test_traffic_is_what_cannot_be_left_out() -> None:
    rows, weight = 4 * 5 * 128, 4 * 128  # bytes
    inputs = PLAIN.make_inputs(5, "cpu")
    assert measure.traffic(PLAIN, inputs) == measure.Traffic(2 * rows + weight, 3 * rows + 2 * weight)
    forgetful = replace(PLAIN, keeps_inputs=False)
    assert measure.traffic(forgetful, inputs).backward == 2 * rows + weight
    own = replace(PLAIN, traffic=lambda inputs, outputs: (outputs[0].nbytes, inputs[1].nbytes))
    assert measure.traffic(own, inputs) == measure.Traffic(rows, weight)
    without = partial(replace, PLAIN, make_inputs=lambda *_: [tensor.detach() for tensor in inputs])
    assert measure.traffic(without(), without().make_inputs(5, "cpu")) == measure.Traffic(2 * rows + weight, 0)


@pytest.mark.parametrize("case", UPDATES, ids=lambda case: case.name)
def test_an_update_is_timed_alone_and_moves_what_is_kept(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the memory accesses of an update: gradients are read, rounded parameters written, all others both."""
    calls: list[tuple[Flat, list[Moment]]] = []
    monkeypatch.setattr(cases, "update_", lambda flat, moments, by: calls.append((flat, list(moments))))
    inputs = case.make_inputs(1, "cpu")
    assert case.timed is not None
    alone, needed = case.timed(inputs), measure.traffic(case, inputs)
    calls.clear()
    with Operations() as operations:
        alone()
    assert operations.count == 0
    ((flat, moments),) = calls
    kept = [*itertools.chain(*(m.tensors() if isinstance(m, Quantized) else (m,) for m in moments))]
    kept += [flat.parameters if flat.master is None else flat.master]
    moved = flat.gradients.nbytes + 2 * sum(tensor.nbytes for tensor in kept)
    if flat.master is not None:
        moved += flat.parameters.nbytes * (2 if flat.master.dtype == torch.int16 else 1)
    assert needed == measure.Traffic(moved, 0)


class Operations(TorchDispatchMode):
    """Counts operations of torch."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **kwargs or {})


def test_both_directions_are_timed() -> None:
    speeds = list(selftest.measure_speed([PLAIN], "cpu", elements=256))
    assert [speed.direction for speed in speeds] == ["forward", "backward"]
    assert all(speed.seconds > 0 for speed in speeds)
    assert speeds[0].rate == pytest.approx((2 * 256 + 128) * 4 / speeds[0].seconds)
    assert "GB/s" in speeds[0].beside(1e9)
    calls: list[int] = []
    case = replace(PLAIN, timed=lambda inputs: lambda: calls.append(1))
    (speed,) = selftest.measure_speed([case], "cpu", elements=256)
    assert speed.direction == "forward"
    assert len(calls) == measure.WARM_UP + measure.REPEATS

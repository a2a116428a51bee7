"""The dynamic loss scale, in Megatron-LM's form."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megalite.optim.loss_scale import LossScale


def run(scale: LossScale, overflows: str) -> list[float]:
    """The scale after each step; "x" overflows."""
    values = []
    for step in overflows:
        scale = scale.after(overflow=step == "x")
        values.append(scale.value)
    return values


def test_it_backs_off_only_once_hysteresis_overflows_have_been_seen_since_it_grew() -> None:
    scale = LossScale.dynamic(initial=64.0, minimum=1.0, window=3, hysteresis=2)
    assert run(scale, "x.x.x") == [64.0, 64.0, 32.0, 32.0, 16.0]


def test_growth_restores_the_hysteresis() -> None:
    scale = LossScale.dynamic(initial=64.0, minimum=1.0, window=3, hysteresis=2)
    assert run(scale, "x...xx") == [64.0, 64.0, 64.0, 128.0, 128.0, 64.0]


def test_an_overflow_starts_the_window_again() -> None:
    scale = LossScale.dynamic(initial=8.0, minimum=1.0, window=3, hysteresis=9)
    assert run(scale, "..x...")[-1] == 16.0
    assert run(scale, "..x..")[-1] == 8.0


def test_it_stays_above_its_minimum() -> None:
    scale = LossScale.dynamic(initial=4.0, minimum=2.0, window=3, hysteresis=1)
    assert run(scale, "xxxx") == [2.0, 2.0, 2.0, 2.0]
    assert not LossScale.dynamic(2.0, 2.0, 3, 1).can_shrink


@given(st.text("x.", max_size=30))
def test_a_constant_scale_is_constant(overflows: str) -> None:
    assert set(run(LossScale(512.0), overflows)) <= {512.0}


@given(st.text("x.", max_size=20), st.text("x.", max_size=20), st.integers(1, 5), st.integers(1, 4))
def test_it_goes_on_from_its_state(before: str, behind: str, window: int, hysteresis: int) -> None:
    rule = LossScale.dynamic(2.0**16, 1.0, window, hysteresis)
    scale = rule
    for step in before:
        scale = scale.after(overflow=step == "x")
    assert run(rule.restored(scale.state()), behind) == run(scale, behind)


@given(st.text("x.", max_size=60), st.integers(1, 5), st.integers(1, 4))
def test_it_is_megatrons_grad_scaler(overflows: str, window: int, hysteresis: int) -> None:
    """Against the trackers of megatron-core's DynamicGradScaler, written out."""
    value, growth, left = 2.0**16, 0, hysteresis
    expected = []
    for step in overflows:
        if step == "x":
            growth, left = 0, left - 1
            if left <= 0:
                value = max(value * 0.5, 1.0)
        else:
            growth += 1
            if growth == window:
                growth, left, value = 0, hysteresis, value * 2.0
        expected.append(value)
    scale = LossScale.dynamic(2.0**16, 1.0, window, hysteresis)
    assert run(scale, overflows) == expected
    assert replace(scale) == scale

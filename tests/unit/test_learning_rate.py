"""The learning rate against Megatron-LM's own values, and what must hold for every schedule."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import OptimizerConfig, TrainingConfig
from megalite.optim.learning_rate import LearningRateSchedule, learning_rate_schedule

# Megatron-LM's scheduler stepped by hand: maximum 1, minimum 0.1, warm-up 10, decay 100, WSD 20, at 0, 10, ..., 110.
GOLDEN = {
    "constant": [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "linear": [0, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1],
    "cosine": [0, 1, 0.9729, 0.8947, 0.775, 0.6281, 0.4719, 0.325, 0.2053, 0.1271, 0.1, 0.1],
    "inverse-square-root": [0, 1, 0.7071, 0.5774, 0.5, 0.4472, 0.4082, 0.378, 0.3536, 0.3333, 0.3162, 0.1],
    "WSD": [0, 1, 1, 1, 1, 1, 1, 1, 1, 0.4728, 0.1, 0.1],
}


def schedule(style: str, **changes: Any) -> LearningRateSchedule:
    values = {"minimum": 0.1, "warmup_samples": 10, "decay_samples": 100, "wsd_decay_samples": 20} | changes
    return LearningRateSchedule(maximum=1.0, style=style, **values)


@pytest.mark.parametrize("style", GOLDEN)
def test_every_style_gives_megatron_values(style: str) -> None:
    rates = [schedule(style).at(consumed) for consumed in range(0, 120, 10)]
    assert rates == pytest.approx(GOLDEN[style], abs=5e-5)


@pytest.mark.parametrize(
    ("wsd_style", "halfway"), [("linear", 0.55), ("cosine", 0.55), ("exponential", 0.4728), ("minus_sqrt", 0.3636)]
)
def test_wsd_falls_by_its_own_style_in_its_last_samples_only(wsd_style: str, halfway: float) -> None:
    wsd = schedule("WSD", wsd_style=wsd_style)
    assert [wsd.at(80), wsd.at(90), wsd.at(100)] == pytest.approx([1.0, halfway, 0.1], abs=5e-5)


def test_a_warmup_starts_at_the_initial_rate_with_the_first_step() -> None:
    assert schedule("cosine", initial=0.5).at(0) == 0.5
    assert schedule("cosine", initial=0.5).at(5) == 0.75


@pytest.mark.parametrize("style", GOLDEN)
def test_without_warmup_the_first_step_has_the_maximum(style: str) -> None:
    assert schedule(style, warmup_samples=0).at(0) == 1.0


@given(
    style=st.sampled_from(sorted(GOLDEN)),
    wsd_style=st.sampled_from(["linear", "cosine", "exponential", "minus_sqrt"]),
    warmup=st.integers(0, 50),
    decay=st.integers(51, 1000),
    first=st.integers(0, 1500),
    second=st.integers(0, 1500),
)
def test_a_rate_stays_in_its_range_and_never_rises_after_the_warmup(
    style: str, wsd_style: str, warmup: int, decay: int, first: int, second: int
) -> None:
    subject = schedule(
        style, wsd_style=wsd_style, warmup_samples=warmup, decay_samples=decay, wsd_decay_samples=decay - warmup
    )
    early, late = sorted([first, second])
    assert 0.0 <= subject.at(early) <= 1.0
    if early >= warmup:
        assert subject.at(early) >= subject.at(late) >= 0.1 - 1e-12


def of_run(optimizer: dict[str, Any], training: dict[str, Any]) -> LearningRateSchedule:
    rates = OptimizerConfig(lr=1.0, min_lr=0.1, lr_decay_style="WSD", lr_wsd_decay_style="linear", **optimizer)
    return learning_rate_schedule(rates, TrainingConfig(micro_batch_size=2, **training), global_batch_size=8)


def test_iterations_count_a_global_batch_each() -> None:
    in_iterations = of_run(
        {"lr_decay_iters": 100, "lr_warmup_iters": 10, "lr_wsd_decay_iters": 20}, {"train_iters": 200}
    )
    in_samples = of_run(
        {"lr_decay_samples": 800, "lr_warmup_samples": 80, "lr_wsd_decay_samples": 160}, {"train_samples": 1600}
    )
    assert in_iterations == in_samples
    assert in_iterations == LearningRateSchedule(1.0, 0.1, 0.0, 80, 800, "WSD", "linear", 160)


def test_the_decay_defaults_to_the_run_and_a_fraction_is_of_the_decay() -> None:
    whole = of_run({"lr_warmup_fraction": 0.25}, {"train_iters": 100})
    assert (whole.decay_samples, whole.warmup_samples) == (800, 200)
    shorter = of_run({"lr_warmup_fraction": 0.5, "lr_decay_iters": 10}, {"train_iters": 100})
    assert (shorter.decay_samples, shorter.warmup_samples) == (80, 40)

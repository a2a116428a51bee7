"""Learning rates and weight decay against closed forms, and what must hold for every schedule.

tests/distributed/test_rates_megatron.py holds them against Megatron-LM's own scheduler.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import OptimizerConfig, TrainingConfig
from megalite.optim.learning_rate import (
    LearningRateSchedule,
    Rates,
    RateSchedules,
    WeightDecaySchedule,
    rate_notes,
    rate_schedules,
)

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


BATCH = 8
HIDDEN = 512


def of_run(training: dict[str, Any], **optimizer: Any) -> RateSchedules:
    return rate_schedules(
        OptimizerConfig(**{"lr": 1.0, "min_lr": 0.1} | optimizer),
        TrainingConfig(micro_batch_size=2, **training),
        hidden_size=HIDDEN,
        global_batch_size=BATCH,
    )


def test_iterations_count_a_global_batch_each() -> None:
    style = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"}
    in_iterations = of_run({"train_iters": 200}, lr_decay_iters=100, lr_warmup_iters=10, lr_wsd_decay_iters=20, **style)
    in_samples = of_run(
        {"train_samples": 1600}, lr_decay_samples=800, lr_warmup_samples=80, lr_wsd_decay_samples=160, **style
    )
    assert in_iterations == in_samples
    assert in_iterations.learning_rate == LearningRateSchedule(1.0, 0.1, 0.0, 80, 800, "WSD", "linear", 160, BATCH)


def test_the_decay_defaults_to_the_run_and_a_fraction_is_of_the_decay() -> None:
    whole = of_run({"train_iters": 100}, lr_warmup_fraction=0.25).learning_rate
    assert (whole.decay_samples, whole.warmup_samples) == (800, 200)
    shorter = of_run({"train_iters": 100}, lr_warmup_fraction=0.5, lr_decay_iters=10).learning_rate
    assert (shorter.decay_samples, shorter.warmup_samples) == (80, 40)


# ---------------------------------------------------------------------------------------------------- noam


def noam(step: int, warmup: int, factor: float = 1.0) -> float:
    """The paper's formula as it stands there; steps from 1."""
    return float(factor * HIDDEN**-0.5 * min(step**-0.5, step * warmup**-1.5))


@given(warmup=st.integers(1, 40), factor=st.floats(0.0, 10.0), step=st.integers(1, 400))
def test_noam_is_the_papers_formula(warmup: int, factor: float, step: int) -> None:
    """In every step, also beyond the end of the run, and however the warm-up is given."""
    subject = of_run({"train_iters": 50}, lr=factor, min_lr=0.0, lr_decay_style="noam", lr_warmup_iters=warmup)
    expected = pytest.approx(noam(step, warmup, factor), rel=1e-12)
    assert subject.at((step - 1) * BATCH).learning_rate == expected
    share = of_run({"train_iters": 50}, lr=factor, min_lr=0.0, lr_decay_style="noam", lr_warmup_fraction=warmup / 50)
    assert share.at((step - 1) * BATCH).learning_rate == expected
    in_samples = of_run(
        {"train_samples": 400}, lr=factor, min_lr=0.0, lr_decay_style="noam", lr_warmup_samples=warmup * BATCH
    )
    assert in_samples == subject


def test_noam_peaks_with_the_step_that_ends_the_warmup_and_then_stays_above_its_minimum() -> None:
    subject = of_run({"train_iters": 100}, lr_decay_style="noam", lr_warmup_iters=4, min_lr=noam(16, 4))
    rates = [subject.at(consumed).learning_rate for consumed in range(0, 100 * BATCH, BATCH)]
    assert rates[0] == pytest.approx(noam(1, 4))
    assert rates[0] < noam(16, 4)
    assert rates[3] == max(rates) == 1 / math.sqrt(HIDDEN * 4)
    assert rates[14:18] == pytest.approx([noam(15, 4), *[noam(16, 4)] * 3])
    assert rates[-1] == noam(16, 4)


def test_noam_counts_a_growing_batch_in_full_ones() -> None:
    subject = of_run({"train_iters": 100}, lr_decay_style="noam", lr_warmup_iters=40, min_lr=0.0)
    steps = [1.0, 1.5, 2.25]
    rates = [subject.at(consumed).learning_rate for consumed in (0, 4, 10)]
    assert rates == pytest.approx([HIDDEN**-0.5 * step * 40**-1.5 for step in steps])


# ---------------------------------------------------------------------------------------------------- by group


def test_word_embedding_and_output_layer_have_a_schedule_of_their_own_of_the_same_shape() -> None:
    flags = {"lr_decay_style": "cosine", "lr_warmup_iters": 10}
    subject = of_run({"train_iters": 110}, decoupled_lr=3.0, decoupled_min_lr=0.3, **flags)
    alone = of_run({"train_iters": 110}, lr=3.0, min_lr=0.3, **flags)
    for consumed in range(0, 900, 3):
        found, plain = subject.at(consumed), of_run({"train_iters": 110}, **flags).at(consumed)
        assert found.token_table_learning_rate == alone.at(consumed).learning_rate
        assert (found.learning_rate, found.weight_decay) == (plain.learning_rate, plain.weight_decay)
        assert plain.token_table_learning_rate == plain.learning_rate
    lowest = of_run({"train_iters": 110}, decoupled_lr=3.0, **flags).at(10_000)
    assert (lowest.learning_rate, lowest.token_table_learning_rate) == (0.1, 0.1)


def test_a_decoupled_rate_of_zero_is_zero() -> None:
    assert of_run({"train_iters": 10}, min_lr=0.0, decoupled_lr=0.0).at(24).token_table_learning_rate == 0.0


def test_a_decoupled_rate_is_a_factor_too_under_noam() -> None:
    flags = {"lr_decay_style": "noam", "lr_warmup_iters": 4, "min_lr": 0.0}
    rates = of_run({"train_iters": 10}, lr=2.0, decoupled_lr=3.0, **flags).at(BATCH)
    assert (rates.learning_rate, rates.token_table_learning_rate) == pytest.approx((noam(2, 4, 2.0), noam(2, 4, 3.0)))


# ---------------------------------------------------------------------------------------------------- weight decay


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [0.5] * 6),
        ("linear", [0.1, 0.2, 0.3, 0.4, 0.5, 0.5]),
        ("cosine", [0.1, 0.3 - 0.1 * math.sqrt(2), 0.3, 0.3 + 0.1 * math.sqrt(2), 0.5, 0.5]),
    ],
)
def test_weight_decay_rises_over_the_whole_run(style: str, expected: list[float]) -> None:
    subject = WeightDecaySchedule(0.1, 0.5, 40, style)
    assert [subject.at(consumed) for consumed in range(0, 60, 10)] == pytest.approx(expected, rel=1e-12)
    assert subject.at(40) == 0.5


@given(
    style=st.sampled_from(["constant", "linear", "cosine"]),
    start=st.floats(0.0, 1.0),
    rise=st.floats(0.0, 1.0),
    samples=st.integers(1, 1000),
    first=st.integers(0, 1500),
    second=st.integers(0, 1500),
)
def test_weight_decay_never_falls(style: str, start: float, rise: float, samples: int, first: int, second: int) -> None:
    subject = WeightDecaySchedule(start, start + rise, samples, style)
    early, late = sorted([first, second])
    assert start <= subject.at(early) <= subject.at(late) + 1e-15 <= start + rise + 2e-15


def test_weight_decay_rises_with_the_run_and_not_with_the_learning_rates_decay() -> None:
    rising = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 1.0}
    subject = of_run({"train_iters": 100}, lr_decay_iters=10, **rising).weight_decay
    assert subject == WeightDecaySchedule(0.0, 1.0, 100 * BATCH, "linear")
    assert of_run({"train_samples": 70}, **rising).weight_decay.samples == 70
    assert of_run({"train_iters": 1}, weight_decay=0.3).at(0).weight_decay == 0.3


# ---------------------------------------------------------------------------------------------------- scaling rules


@pytest.mark.parametrize(("rule", "base", "multiplier"), [("linear", 2, 4.0), ("sqrt", 2, 2.0), ("linear", 16, 0.5)])
def test_a_scaling_rule_multiplies_the_whole_curve_and_says_so(rule: str, base: int, multiplier: float) -> None:
    flags = {"lr_decay_style": "cosine", "decoupled_lr": 3.0}
    scaled = of_run({"train_iters": 10}, lr_scaling_rule=rule, lr_scaling_base_batch_size=base, **flags)
    plain = of_run({"train_iters": 10}, **flags)
    for consumed in range(0, 120, 4):
        rates = plain.at(consumed)
        assert scaled.at(consumed) == Rates(
            pytest.approx(multiplier * rates.learning_rate, rel=1e-12),
            pytest.approx(multiplier * rates.token_table_learning_rate, rel=1e-12),
            rates.weight_decay,
        )
    optimizer = OptimizerConfig(lr=1.0, lr_scaling_rule=rule, lr_scaling_base_batch_size=base)  # type: ignore[arg-type]
    (note,) = rate_notes(optimizer, scaled, BATCH)
    ratio = f"{BATCH} / {base}" if rule == "linear" else f"sqrt({BATCH} / {base})"
    assert note == (
        f"--lr-scaling-rule {rule}: learning rates (but --lr-warmup-init) are multiplied by {ratio} = {multiplier:g}: "
        f"--lr 1 counts as {multiplier:g}"
    )
    assert rate_notes(OptimizerConfig(lr=1.0), plain, BATCH) == ()


def test_a_gradual_warmup_starts_from_the_rate_that_is_not_scaled() -> None:
    """Check the gradual warm-up of Goyal et al. 2017, 2.2."""
    scaling = {"lr_scaling_rule": "linear", "lr_scaling_base_batch_size": 2}
    subject = of_run({"train_iters": 100}, lr_warmup_init=1.0, lr_warmup_iters=10, **scaling)
    assert [subject.at(consumed).learning_rate for consumed in (0, 40, 80)] == [1.0, 2.5, 4.0]


def test_what_noam_makes_of_the_rate_is_said() -> None:
    flags: dict[str, Any] = {"lr": 2.0, "lr_decay_style": "noam", "min_lr": 0.0}
    subject = of_run({"train_iters": 100}, lr_warmup_iters=50, **flags)
    assert rate_notes(OptimizerConfig(**flags), subject, BATCH) == (
        "--lr-decay-style noam: the learning rate rises to 0.0125 within 50 steps; --lr 2 is the formula's factor",
    )

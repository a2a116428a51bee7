"""Learning rates and weight decay are Megatron-LM's: against megatron-core's scheduler, step by step over whole runs,
through a resume and beyond the end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megalite.config import OptimizerConfig, TrainingConfig
from megalite.optim.learning_rate import rate_schedules
from tests.distributed import megatron_rates
from tests.harness.rank_pool import RankPools

BATCH = 8
WSD = ("exponential", "linear", "cosine", "minus_sqrt")
SHAPES = [(style, WSD[0]) for style in ("constant", "linear", "cosine", "inverse-square-root")]
SHAPES += [("WSD", wsd_style) for wsd_style in WSD]


@st.composite
def runs(draw: st.DrawFn, style: str) -> tuple[dict[str, Any], dict[str, int], dict[str, Any]]:
    """Draw the flags of the optimizer and of training, and the lengths in samples that Megatron-LM derives from
    them."""
    unit, each = draw(st.sampled_from([("iters", BATCH), ("samples", 1)]))
    length = draw(st.integers(20, 40)) * (BATCH if unit == "samples" else 1)
    decay = draw(st.none() | st.integers(length // 2, 2 * length))
    flags: dict[str, Any] = {} if decay is None else {f"lr_decay_{unit}": decay}
    whole = length if decay is None else decay
    warmup_in = draw(st.sampled_from(["none", unit, "fraction"]))
    warmup: float = 0
    if warmup_in == unit:
        flags[f"lr_warmup_{unit}"] = warmup = draw(st.integers(1, whole // 2))
    elif warmup_in == "fraction":
        flags["lr_warmup_fraction"] = draw(st.floats(0.0, 0.5))
        warmup = flags["lr_warmup_fraction"] * whole
    lengths = {"lr_warmup_steps": warmup * each, "lr_decay_steps": whole * each, "wd_incr_steps": length * each}
    if style == "WSD":
        flags[f"lr_wsd_decay_{unit}"] = draw(st.integers(1, whole // 2))
        lengths["wsd_decay_steps"] = flags[f"lr_wsd_decay_{unit}"] * each
    return flags, {f"train_{unit}": length}, lengths


@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
@pytest.mark.parametrize(
    ("style", "wsd_style", "weight_decay_style"),
    [
        pytest.param(*shape, decay, marks=[pytest.mark.wide] * ((row - column) % 3 > 0))  # in turn
        for row, shape in enumerate(SHAPES)
        for column, decay in enumerate(("linear", "cosine", "constant"))
    ],
)
def test_whole_runs(
    style: str, wsd_style: str, weight_decay_style: str, data: st.DataObject, rank_pools: RankPools
) -> None:
    flags, training, lengths = data.draw(runs(style))
    decoupled = data.draw(st.sampled_from([(None, None), (0.5, None), (2.0, 0.4), (0.0, 0.0)]))
    initial, minimum = data.draw(st.sampled_from([(0.0, 0.0), (0.3, 0.1), (1.0, 1.0)]))
    if decoupled[0] is not None and decoupled[1] is None:
        minimum = min(minimum, 0.1)
    rising = weight_decay_style != "constant"
    optimizer = OptimizerConfig(
        lr=1.0,
        min_lr=minimum,
        decoupled_lr=decoupled[0],
        decoupled_min_lr=decoupled[1],
        lr_decay_style=style,  # type: ignore[arg-type]
        lr_wsd_decay_style=wsd_style,  # type: ignore[arg-type]
        lr_warmup_init=initial,
        weight_decay=0.1,
        weight_decay_incr_style=weight_decay_style,  # type: ignore[arg-type]
        start_weight_decay=0.05 if rising else None,
        end_weight_decay=0.2 if rising else None,
        **flags,
    )
    theirs = {
        "init_lr": initial,
        "max_lr": 1.0,
        "min_lr": minimum,
        "lr_decay_style": style,
        "lr_wsd_decay_style": wsd_style,
        "start_wd": 0.05 if rising else 0.1,
        "end_wd": 0.2 if rising else 0.1,
        "wd_incr_style": weight_decay_style,
        **lengths,
    }
    samples = data.draw(st.lists(st.just(BATCH) | st.integers(1, 2 * BATCH), min_size=90, max_size=90))
    resume_at = data.draw(st.integers(0, 60))
    (expected,) = rank_pools(1).run(megatron_rates.trajectory, decoupled, samples, resume_at, theirs)
    schedules = rate_schedules(
        optimizer, TrainingConfig(micro_batch_size=1, **training), hidden_size=1, global_batch_size=BATCH
    )
    for step, (plain, tables, weight_decay) in enumerate(expected):
        rates = schedules.at(sum(samples[:step]))
        found = (rates.learning_rate, rates.token_table_learning_rate, rates.weight_decay)
        assert found == pytest.approx((plain, tables, weight_decay), rel=1e-12, abs=1e-15), step

"""Schedules that a program gives as functions of the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megalite
from megalite.errors import ConfigurationError
from tests.distributed.several_run import OPTIMIZERS, saved_manifest, trainer


def halved(step: int) -> float:
    return 0.5**step


def run(schedule: Any, **options: Any) -> megalite.Trainer:
    torch.manual_seed(0)
    return megalite.Trainer(
        nn.Linear(2, 1),
        loss=lambda outputs, batch: outputs.square().mean(),
        dataset=[torch.ones(2)] * 8,
        micro_batch_size=2,
        optimizer=megalite.SGD(lr=0.1, schedule=schedule),
        quiet=options.pop("quiet", True),
        watchdog=False,
        **options,
    )


def rates(trained: megalite.Trainer, steps: int) -> list[float]:
    return [trained.step(batch)["learning_rate"] for batch in trained.batches(steps=steps)]


def test_the_rate_is_lr_times_a_function_of_the_step_also_after_a_resume(tmp_path: Path) -> None:
    first = run(halved, save=tmp_path)
    assert rates(first, 3) == [0.1, 0.05, 0.025]
    first.close()
    assert saved_manifest(tmp_path)["config"]["schedules"] == {"optimizer": {"step": 2, "factor": 0.25}}
    second = run(halved, save=tmp_path)
    assert len(second._trainer.loaded.notes) == 1  # none of them is about the rate
    assert rates(second, 5) == [0.0125, 0.00625]
    second.close()


def test_each_of_several_optimizers_has_a_function_of_its_own_steps() -> None:
    with trainer(1, optimizer={**OPTIMIZERS, "critic": megalite.SGD(lr=1.0, schedule=halved)}) as trained:
        records = [trained.step(only=name) for name in ("critic", "generator", "critic")]
    assert [record["learning_rate"] for record in records] == [1.0, 0.01, 0.5]


@pytest.mark.wide_except(
    "constant-the schedule of optimizer is no function of the step here, and was one in the run that saved"
)
@pytest.mark.parametrize(
    ("then", "told"),
    [
        (lambda step: 0.25**step, "is 0.25 x lr at step 1, and was 0.5 x lr in the run that saved"),
        ("constant", "the schedule of optimizer is no function of the step here, and was one in the run that saved"),
    ],
)
def test_another_function_at_a_resume_is_noted(then: Any, told: str, tmp_path: Path, capsys: Any) -> None:
    with run(halved, save=tmp_path) as trained:
        rates(trained, 2)
    with run(then, save=tmp_path, quiet=False) as trained:
        rates(trained, 3)
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (lambda step: -1.0, "the schedule returned -1.0 for step 0: return a factor of lr"),
        (lambda step: torch.ones(1), "return a factor of lr, at least 0"),
        (lambda step, seen=[]: seen.append(step) or float(len(seen)), "at a second call: a factor must depend on"),
    ],
)
def test_a_function_that_is_no_schedule_is_refused(schedule: Any, told: str) -> None:
    with pytest.raises(megalite.MegaliteError, match=told):
        run(schedule)


@pytest.mark.wide
@pytest.mark.parametrize("schedule", [lambda step: [1.0, 0.5][step], lambda step: 1.0 - step])
def test_a_function_may_end_with_the_run(schedule: Any, tmp_path: Path) -> None:
    with run(schedule, save=tmp_path) as trained:
        rates(trained, 2)
    assert saved_manifest(tmp_path)["config"]["schedules"]["optimizer"] == {"step": 1, "factor": schedule(1)}


def test_a_function_says_all_of_the_rate() -> None:
    with pytest.raises(ConfigurationError, match="is a function, which says all of the rate: drop warmup"):
        megalite.AdamW(lr=1.0, schedule=halved, warmup=3).config()

"""Time of a run by its causes, and its summary at the end, from its records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from megalite.run.end import end_summary, what_next
from megalite.training.facts import Facts
from megalite.training.metrics import StepMetrics


def step(number: int, wall_time: float, **more: Any) -> dict[str, Any]:
    """Return the record of a step of two seconds at 100 tokens a second."""
    speed = {"tokens_per_second": 100.0, "mfu": 0.25}
    record = StepMetrics(
        number, 4 * number, 200 * number, {"lm_loss": 3.0}, 1.0, 1e-3, 1.0, False, 2.0, speed, 2**29, 0
    )
    return record.record() | {"wall_time": wall_time} | more


def valid(number: int, wall_time: float, loss: float | str, seconds: float) -> dict[str, Any]:
    where = {"iteration": number, "consumed_samples": 4 * number, "consumed_tokens": 200 * number}
    return where | {"valid_loss": loss, "evaluation_time_s": seconds, "wall_time": wall_time}


def facts_of(records: Iterable[dict[str, Any]]) -> Facts:
    facts = Facts()
    for record in records:
        facts.add(record)
    return facts


RUN = [
    step(1, 1012.0, start_time_s=10.0, data_time_s=0.5),  # begins at 1000
    step(2, 1014.5, data_time_s=0.25),  # 0.5 of something else
    valid(2, 1017.5, 2.75, 3.0),
    step(3, 1023.5, save_time_s=4.0),  # then two steps, which are run again, and a pause
    step(4, 1123.5, start_time_s=20.0, data_time_s=1.0) | {"skipped": True, "grad_norm": "NaN", "lm_loss": "NaN"},
    valid(4, 1124.5, "NaN", 1.0),
    valid(4, 1125.5, 2.875, 1.0),
]


def test_all_time_from_the_start_to_the_last_record_has_a_cause() -> None:
    spent = facts_of(RUN).spent
    assert spent == {
        "steps": 8.0 - 1.75,
        "data": 1.75,
        "evaluations": 5.0,
        "saves": 4.0,
        "start": 10.0,
        "restarts": 98.0,
        "other": 0.5,
    }
    assert sum(spent.values()) == 125.5


def test_a_clock_that_is_set_back_takes_no_time_from_a_cause() -> None:
    assert facts_of([step(1, 100.0), step(2, 50.0), step(3, 53.0)]).spent | {"steps": 6.0, "other": 1.0} == (
        facts_of([step(1, 100.0), step(2, 50.0), step(3, 53.0)]).spent
    )
    assert set(facts_of([]).spent.values()) == {0.0}


def test_a_summary_says_what_the_records_say() -> None:
    gathered = {
        "predicted_memory_bytes": 3.5 * 2**30,
        "peak_memory_bytes/max": 2.0**30,
        "peak_memory_bytes/max_rank": 3.0,
    }
    shares = {"scaling_efficiency": 0.8, "communication_share": 0.125}
    records = [*RUN[:2], RUN[2], RUN[3] | gathered | shares, *RUN[4:]]
    assert end_summary(facts_of(records)) == {
        "steps": "4, 1 skipped",
        "consumed": "16 samples, 800 tokens",
        "time": "0:02:06, with 1 restart",
        "of the time": "restarts 78.1%, start 8.0%, steps 5.0%, evaluations 4.0%, saves 3.2%, data 1.4%, other 0.4%",
        "speed": "100 tokens/s in steps, MFU 25.0%",
        "loss": "nan in the last step, best validation 2.7500 at step 2",
        "ranks": "work 80.0% of a step; all wait 12.5% of it",
        "memory": "at most 1 GiB on rank 3; counted at the start: 3.5 GiB on rank 0",
    }


def test_a_run_without_a_file_is_summed_up_by_its_last_step() -> None:
    record = {name: value for name, value in step(7, 0.0).items() if name != "wall_time"}
    assert end_summary(facts_of([record])) == {
        "steps": "7",
        "consumed": "28 samples, 1,400 tokens",
        "speed": "100 tokens/s in steps, MFU 25.0%",
        "loss": "3.0000 in the last step",
        "memory": "at most 512 MiB on rank 0",
    }
    assert end_summary(Facts()) == {}


@pytest.mark.parametrize("finished", [True, False])
def test_what_follows_is_named(finished: bool) -> None:
    lines = what_next("run/x", finished=finished, generates=True)  # type: ignore[arg-type]
    assert lines["report"] == "megalite-report run/x"
    assert ("--resume auto" in lines.get("continue", "")) is not finished
    assert what_next(None, finished=finished, generates=True) == {"saved": "nothing, without --save"}

"""Figures of a report follow from the records, by hand."""

from __future__ import annotations

import math
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.extras.report.figures import (
    DECIDED,
    LEFT_OUT,
    NOT_FINITE,
    RESTARTED,
    SAVED,
    SKIPPED,
    Waits,
    figures,
    findings,
    marks,
    means,
    ranges,
    share_text,
    thinned,
    waits,
)
from megalite.extras.report.page import page
from megalite.extras.report.recorded import Recorded, read_run
from tests.extras.report.runs import BEGAN, step, validation, write_run


def run_of(folder: Path, lines: list[dict[str, Any]], **others: Any) -> Recorded:
    return read_run(str(write_run(folder, sorted(lines, key=lambda line: line["wall_time"]), **others)))


def test_facts(tmp_path: Path) -> None:
    lines = [step(number, mfu=0.25 + 0.25 * (number == 4)) for number in range(1, 5)]
    lines[0]["predicted_memory_bytes"] = 900
    lines += [validation(3, 3.5), validation(4, 3.75)]
    found = figures(run_of(tmp_path, lines, config="training:\n  train_iters: 9\n"))
    assert found == {
        "first_step": 1,
        "last_step": 4,
        "planned_steps": 9,
        "state": "unfinished",
        "loss": 3.96,
        "last_loss": 3.96,
        "best_valid_loss": 3.5,
        "best_valid_step": 3,
        "last_valid_loss": 3.75,
        "test_loss": None,
        "consumed_samples": 40.0,
        "consumed_tokens": 4000.0,
        "seconds": 2.0 + 3 * 3.0 + 0.5,  # from the start of the first step to the last line
        "tokens_per_second": 500.0,
        "samples_per_second": None,
        "mfu": 0.3125,  # as its steps take equal times
        "peak_memory_bytes": 1004.0,
        "peak_memory_rank": 0,
        "predicted_memory_bytes": 900.0,
        "skipped_steps": 0,
        "steps_without_finite_loss": 0,
        "goodput": 8.0 / 11.5,  # 3.5 s between the lines are of nothing that is told
        "restarts": 0,
        "decisions": 0,
        "last_written": BEGAN + 12.5,
    }


def test_the_loss_is_a_mean_of_the_last_fiftieth(tmp_path: Path) -> None:
    run = run_of(tmp_path, [step(number) for number in range(1, 101)])
    assert figures(run)["loss"] == pytest.approx((4.0 - 0.99 + 4.0 - 1.0) / 2)


@pytest.mark.parametrize(
    ("last", "done", "state"), [(1.0, True, "finished"), (1.0, False, "unfinished"), ("NaN", False, "diverged")]
)
def test_state(last: object, done: bool, state: str, tmp_path: Path) -> None:
    assert figures(run_of(tmp_path, [step(1), step(2, lm_loss=last)], done=done))["state"] == state


def test_an_empty_run_has_no_facts(tmp_path: Path) -> None:
    found = figures(run_of(tmp_path, []))
    assert found.pop("state") == "empty"
    assert not any(found.values())


def test_marks_of_all_kinds(tmp_path: Path) -> None:
    lines = [
        step(1, start_time_s=9.0), step(2, skipped=True, grad_norm="Infinity"), step(3, lm_loss="NaN"),
        step(4, start_time_s=5.0), step(5, save_time_s=0.25), step(6, skipped=True),
    ]  # fmt: skip
    ledger = [{"step": 3, "kind": "late", "why": "rank 2"}]
    found = [(mark.step, mark.kind) for mark in marks(run_of(tmp_path, lines, ledger=ledger))]
    assert sorted(found) == sorted(
        [(2, SKIPPED), (3, NOT_FINITE), (3, DECIDED), (4, RESTARTED), (4, SAVED), (6, LEFT_OUT)]
    )


def test_findings_say_what_went_wrong(tmp_path: Path) -> None:
    slow = {"iteration_time_s/slowest_rank": 3.0, "iteration_time_s/slowest_rank_work": 3.0}
    slow |= {f"iteration_time_s/{name}": 0.5 for name in ("data", "forward_and_backward", "optimizer")}
    lines = [step(number, **slow, skipped=number == 7) for number in range(1, 40)]
    for line in lines[1:3]:
        line |= {"skipped": True, "grad_norm": "NaN"}
    lines += [validation(10, 3.0), validation(30, 3.5)]
    assert findings(run_of(tmp_path, lines, after=b"{")) == [
        f"{tmp_path / 'metrics.jsonl'} has 1 damaged line, left out here",
        "2 steps skipped, as gradients were not finite: 2 to 3.",
        "The update of 1 step was left out, as told: 7.",
        "The validation loss is 3.5 now, and was best at step 10 with 3.",
        "Rank 3 was the slowest in 100 % of the measurements, with 100 % more work than the median rank.",
        "Steps took 67 % of the time (other 33 %).",
    ]


def wait(axis: str, median: float, most: float, longest: int, least: int) -> dict[str, float]:
    key = f"wait_s/{axis}"
    return {key: median, f"{key}/max": most, f"{key}/max_rank": longest, f"{key}/min_rank": least}


def test_who_waits_for_whom(tmp_path: Path) -> None:
    lines = [
        step(1, iteration_time_s=3.0, **wait("dp", 0.25, 0.5, 2, 1)),
        step(2, iteration_time_s=3.0),
        step(3, iteration_time_s=3.0, **wait("dp", 0.75, 1.5, 2, 3), **wait("x", 0.1, 0.2, 0, 1)),
        step(4, iteration_time_s=3.0, **wait("dp", 0.5, 1.0, 0, 3)),
    ]
    run = run_of(tmp_path, lines)
    assert waits(run) == [Waits("dp", 0.5, 1.0, (2, 2 / 3), (3, 2 / 3)), Waits("x", 0.1, 0.2, (0, 1.0), (1, 1.0))]
    assert findings(run) == [
        "On dp, ranks wait for rank 3 in 67 % of the measurements, up to 33 % of a step: rank 2 the most."
    ]
    assert "<td>rank 2 in 67 %, 1,000 ms</td><td>rank 3 in 67 %</td>" in page([run])


def test_a_quiet_run_has_no_findings(tmp_path: Path) -> None:
    lines = [step(number, iteration_time_s=3.0) for number in range(1, 40)]
    assert findings(run_of(tmp_path, [*lines, validation(39, 3.0)])) == []


def test_ranges() -> None:
    assert ranges([7, 3, 8, 9, 9]) == "3, 7 to 9"
    assert ranges(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"
    assert ranges([]) == ""


def test_shares() -> None:
    assert [share_text(share) for share in (0.0, 0.001, 0.012, 0.995, 1.0)] == [
        "0 %", "less than 1 %", "1 %", "100 %", "100 %",
    ]  # fmt: skip


@given(st.lists(st.floats(width=32), max_size=400), st.integers(2, 50))
def test_thinned_values_have_every_peak_and_no_value_that_is_not_finite(values: list[float], most: int) -> None:
    chosen = thinned(array("d", values), most)
    finite = [value for value in values if math.isfinite(value)]
    assert chosen == sorted(set(chosen))
    assert all(math.isfinite(values[place]) for place in chosen)
    assert len(chosen) <= max(most, 2) + 2
    if finite:
        shown = [values[place] for place in chosen]
        assert (min(shown), max(shown)) == (min(finite), max(finite))


def test_a_single_spike_survives_thinning() -> None:
    values = array("d", [random.Random(0).random()] * 100_000)
    values[77_777] = 50.0
    assert 77_777 in thinned(values, 600)


def test_means_are_of_equal_parts() -> None:
    assert means(array("d", [1, 3, 5, math.nan, 9, math.inf]), 3) == [(0, 2.0), (1, 5.0), (2, 9.0)]
    assert means(array("d", [1, 2]), 60) == [(0, 1.0), (1, 2.0)]
    assert means(array("d", [math.nan, 2]), 2) == [(1, 2.0)]

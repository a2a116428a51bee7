"""Steps whose loss jumps: they are found, named, left out, and what follows is as if they had never been."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.runs import GPT2, MOCK, Run, words
from tests.extras.alarms.alarm_run import ALARMS, BATCH, SPIKE, STEPS, Course, item, items, own_model, train, wrong_item
from tests.harness.rank_pool import RankPools

SPIKY = ((SPIKE - 1) * BATCH, SPIKE * BATCH - 1)
"""First and last sample of the step that makes the loss jump."""
WITHOUT = range(SPIKY[0], SPIKY[1] + 1)
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "dp2": {"zero": 1, "overlap": True},
    "pp2": {"pp": 2},
    "tp2": {"tp": 2, "sequence_parallel": True},
    "cp2": {"cp": 2},
    "zero3": {"zero": 3},
}


def ledger(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def steps_of(folder: Path) -> list[int]:
    """Return the steps that the records are of, in order; evaluations are left out."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["iteration"] for record in records if "grad_norm" in record]


def assert_same(found: Course, expected: Course) -> None:
    assert found.records == expected.records
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())
    assert found.consumed == expected.consumed


@pytest.mark.wide_except("dp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_goes_back_is_one_without_the_samples(layout: str, rank_pools: RankPools, tmp_path: Path) -> None:
    """It goes back two steps, to the checkpoint, and trains on what data without the samples of the spike have."""
    pool, options = rank_pools(2), {"spiky_loss_policy": "rewind", **ALARMS}
    found = pool.run(train, LAYOUTS[layout], items(), tmp_path / "run", **options)
    expected = pool.run(train, LAYOUTS[layout], items(without=WITHOUT))
    for course, plain in zip(found, expected, strict=True):
        assert_same(course, plain)
        assert course.numbers == [*range(1, SPIKE + 1), SPIKE - 1, *range(SPIKE, STEPS + 1)]
        assert course.skipped == [SPIKE]
        assert course.left_out == [SPIKY]
        assert course.decisions == found[0].decisions
    (line,) = ledger(tmp_path / "run")
    assert (line["step"], line["kind"], line["samples"], line["outcome"]) == (
        SPIKE - 1,
        "spike",
        [list(SPIKY)],
        "left out",
    )
    assert f"its rows: sample {SPIKY[0] + 2} (loss " in line["why"]
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))


def forget_after(folder: Path, step: int) -> None:
    """Leave a run directory as a crash does before the checkpoints of later steps."""
    for path in folder.glob("iter_*"):
        if int(path.name.removeprefix("iter_")) > step:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{step}\n")
    (folder / "DONE").unlink(missing_ok=True)


@pytest.mark.wide_except("9")
@pytest.mark.parametrize("step", [9, 12])
def test_a_run_that_is_started_again_decides_the_same(step: int, tmp_path: Path) -> None:
    """After a crash before the first save since it went back, it goes back again; after one, it need not."""
    folder, options = tmp_path / "run", {"spiky_loss_policy": "rewind", **ALARMS}
    whole = train({}, items(), folder, **options)
    decided = ledger(folder)
    forget_after(folder, step)
    resumed = train({}, items(), folder, **options)
    assert resumed.records == whole.records[step:]
    assert SPIKE in resumed.skipped if step < SPIKE else not resumed.skipped
    assert ledger(folder) == decided
    assert steps_of(folder) == list(range(1, STEPS + 1))
    assert_same(Course(resumed.records, weights=resumed.weights, consumed=resumed.consumed), Course(
        resumed.records, weights=whole.weights, consumed=whole.consumed
    ))  # fmt: skip


def test_another_layout_passes_over_the_samples_without_alarms(rank_pools: RankPools, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = train({}, items(), folder, spiky_loss_policy="rewind", **ALARMS)
    forget_after(folder, 12)
    for course in rank_pools(2).run(train, LAYOUTS["pp2"], items(), folder):
        assert course.left_out == [SPIKY]
        assert course.consumed == whole.consumed
        losses = [float(record.split()[1].rstrip("}")) for record in course.records]
        assert losses == pytest.approx([float(record.split()[1].rstrip("}")) for record in whole.records[12:]])


def test_several_spikes_are_all_left_out(tmp_path: Path) -> None:
    """It goes back to step 9 from the first and, without a save since, from the second, and to 12 from the third."""
    wrong = [36, 45, 57]
    found = train({}, items(wrong), tmp_path / "run", spiky_loss_policy="rewind", **ALARMS)
    without = [sample // BATCH * BATCH + number for sample in wrong for number in range(BATCH)]
    assert_same(found, train({}, items(wrong, without)))
    assert found.left_out == [(36, 39), (44, 47), (56, 59)]
    assert [line["samples"] for line in ledger(tmp_path / "run")] == [[[36, 39]], [[44, 47]], [[56, 59]]]


def test_it_goes_back_to_a_checkpoint_of_its_own_run_alone(run: Run, tmp_path: Path) -> None:
    """The directory has those of steps 15 and 20 of a run that was left at step 10."""
    flags = [*MOCK, *GPT2, *words("--train-iters 20 --lr-decay-style constant --save-interval 5"), "--save", tmp_path]
    run(*flags)
    alarms = "--check-for-spiky-loss --spiky-loss-policy rewind --spiky-loss-factor 1.01 --spiky-loss-window 3"
    again = run(*flags, "--load", tmp_path, "--ckpt-step", 10, *words(alarms))
    assert "The run has gone back from step 15 to 10, without them" in again.stdout
    assert steps_of(tmp_path) == list(range(1, 21))


def test_old_checkpoints_may_be_removed_meanwhile(rank_pools: RankPools, tmp_path: Path) -> None:
    """Rank 0 removes them in the background, and all ranks look at the directory."""
    options = {"spiky_loss_policy": "rewind", "save_retain_interval": 6, "async_save": True, **ALARMS}
    for course in rank_pools(2).run(train, LAYOUTS["dp2"], items(), tmp_path / "run", **options):
        assert not course.error
        assert course.skipped == [SPIKE]


def test_starts_are_told_apart_from_going_back(tmp_path: Path) -> None:
    """A run that goes back to where it was started again has started once more, and not twice."""
    folder, options = tmp_path / "run", {"spiky_loss_policy": "rewind", **ALARMS}
    train({}, items(()), folder, steps=9, **ALARMS)
    train({}, items(), folder, **options)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records if "start_time_s" in record] == [1, 10]
    assert [record["iteration"] for record in records if "predicted_memory_bytes" in record] == [1, 10]


def test_steps_before_a_spike_are_left_out_too(tmp_path: Path) -> None:
    """Two more are asked for, and one came after the checkpoint."""
    options = {"spiky_loss_policy": "rewind", "spiky_loss_left_out_steps": 3, **ALARMS}
    found = train({}, items(), tmp_path / "run", **options)
    without = range(SPIKY[0] - BATCH, SPIKY[1] + 1)
    assert_same(found, train({}, items(without=without)))
    assert found.left_out == [(without[0], without[-1])]


def test_the_update_of_a_spike_is_skipped(rank_pools: RankPools, tmp_path: Path) -> None:
    """The samples are consumed, the learning rate goes on, and a run that is started again finds it as well."""
    options = {"spiky_loss_policy": "skip", **ALARMS}
    found = rank_pools(2).run(train, LAYOUTS["dp2"], items(), tmp_path / "run", **options)
    plain = rank_pools(2).run(train, LAYOUTS["dp2"], items())
    for course, other in zip(found, plain, strict=True):
        assert course.skipped == [SPIKE]
        assert course.records[:SPIKE] == other.records[:SPIKE]
        assert course.records[SPIKE] != other.records[SPIKE]
        assert course.consumed == BATCH * STEPS
        assert [record.split()[-1] for record in course.records] == [record.split()[-1] for record in other.records]
        assert course.decisions == found[0].decisions
    (line,) = decided = ledger(tmp_path / "run")
    assert (line["step"], line["samples"], line["outcome"]) == (SPIKE, [list(SPIKY)], "left out")
    forget_after(tmp_path / "run", 9)
    again = rank_pools(2).run(train, LAYOUTS["dp2"], items(), tmp_path / "run", **options)
    assert [course.records for course in again] == [course.records[9:] for course in found]
    assert ledger(tmp_path / "run") == decided


@pytest.mark.wide_except("why0")
@pytest.mark.parametrize("why", [{"save_interval": 100}, {"by_program": True}])
def test_a_run_that_cannot_go_back_skips(why: Mapping[str, Any], tmp_path: Path) -> None:
    """It has no checkpoint yet, or its program has drawn the samples."""
    options = {"spiky_loss_policy": "rewind", **ALARMS}
    found = train({}, items(), tmp_path / "run", **options, **why)
    skipped = train({}, items(), tmp_path / "other", **{**options, "spiky_loss_policy": "skip"})
    assert_same(found, skipped)
    assert found.skipped == [SPIKE]


@pytest.mark.wide_except("2-4")
@pytest.mark.parametrize(("micro_batch_size", "experts"), [(1, None), (2, 4)])
def test_reports_change_nothing(
    micro_batch_size: int, experts: int | None, rank_pools: RankPools, tmp_path: Path
) -> None:
    """Dropout is left out of the losses of rows, and back in the next step; the loads of experts count them once."""
    options = {"dropout": 0.1, "micro_batch_size": micro_batch_size, "experts": experts}
    alarms = {**ALARMS, "check_for_large_grads": True, "on_not_finite": "end"}
    found = rank_pools(2).run(train, LAYOUTS["dp2"], items(), tmp_path / "run", **options, **alarms)
    for course, plain in zip(found, rank_pools(2).run(train, LAYOUTS["dp2"], items(), **options), strict=True):
        assert_same(course, plain)
        assert course.decisions == found[0].decisions
    line = ledger(tmp_path / "run")[0]
    assert (line["step"], line["kind"], line["outcome"]) == (SPIKE, "spike", "trained")
    assert f"its rows: sample {SPIKY[0] + 2} (loss " in line["why"]


def test_steps_are_not_trained_on_as_told(tmp_path: Path) -> None:
    """Counted from 0, as Megatron-LM does."""
    found = train({}, items(()), tmp_path / "run", iterations_to_skip=(3, 5))
    assert found.skipped == [4, 6]
    assert [(line["step"], line["kind"], line["samples"]) for line in ledger(tmp_path / "run")] == [
        (4, "skip", [[12, 15]]),
        (6, "skip", [[20, 23]]),
    ]


def test_a_run_ends_when_every_step_is_a_spike(tmp_path: Path) -> None:
    """It does if updates are left out, and if it goes back from each."""
    wrong = range(SPIKY[0], BATCH * (STEPS + 6))
    for policy in ("skip", "rewind"):
        found = train({}, items(wrong), tmp_path / policy, steps=30, spiky_loss_policy=policy, **ALARMS)
        assert "It is the 10th such step in a row" in found.error
        assert len(found.skipped) == 10


def test_a_run_that_comes_on_does_not_end(tmp_path: Path) -> None:
    """Every second batch is wrong, and a step with other samples follows each time."""
    wrong = [batch * BATCH for batch in range(SPIKE - 1, SPIKE + 23, 2)]
    data = [wrong_item(number) if number in wrong else item(number) for number in range(40 * BATCH)]
    for policy in ("skip", "rewind"):
        found = train(
            {}, data, tmp_path / policy, steps=32 if policy == "skip" else 21, spiky_loss_policy=policy, **ALARMS
        )
        assert not found.error
        assert len(found.skipped) > 10


def test_a_run_that_is_started_again_ends_at_the_same_step(tmp_path: Path) -> None:
    wrong, options = range(SPIKY[0], BATCH * (STEPS + 6)), {"spiky_loss_policy": "skip", **ALARMS}
    assert not train({}, items(wrong), tmp_path / "run", steps=15, **options).error
    again = train({}, items(wrong), tmp_path / "run", steps=30, **options)
    assert again.error.startswith("the loss of step 20, ")


def test_losses_of_rows_are_without_dropout(tmp_path: Path) -> None:
    """Equal samples have equal losses, whatever dropout drops of each."""
    data = [item(0) if number in (SPIKY[0], SPIKY[0] + 1) else each for number, each in enumerate(items())]
    train({}, data, tmp_path / "run", dropout=0.3, **ALARMS)
    line = next(line for line in ledger(tmp_path / "run") if line["step"] == SPIKE)
    rows = dict(re.findall(r"sample (\d+) \(loss (\S+), item", line["why"]))
    assert rows.keys() == set(map(str, range(SPIKY[0], SPIKY[1] + 1)))
    assert rows[str(SPIKY[0])] == rows[str(SPIKY[0] + 1)]


@pytest.mark.parametrize(("layout", "size"), [({}, 2), ({"pp": 2}, 1)], ids=["dp2", "pp2"])
def test_a_model_of_ones_own(layout: Mapping[str, Any], size: int, rank_pools: RankPools, tmp_path: Path) -> None:
    """Its micro-batches are named, and of their samples the places in the dataset."""
    spiky, _ = rank_pools(2).run(own_model, layout, size, tmp_path / "run")
    (line,) = ledger(tmp_path / "run")
    first = spiky // size * size
    named = f"sample{'s' * (size > 1)} {', '.join(map(str, range(first, first + size)))}"
    assert f"its rows: {named} (loss " in line["why"]
    assert "item 42 of the dataset" in line["why"]

"""The lists of a run: all are proved before the first step, quickly, and each rank runs what was proved."""

from __future__ import annotations

import gc
import sys

import pytest

from megalite.parallel.stage import TensorSpec
from megalite.pipeline import proved_schedules as module
from megalite.pipeline.lowering import Reductions, lower
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.pipeline.schedules import SCHEDULES, Action, orders_of
from megalite.pipeline.simulator import ScheduleError
from megalite.pipeline.stages import Stages


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2)])
def test_a_rank_gets_its_list_of_those_of_all(schedule: str, chunks: int) -> None:
    stages, reductions = Stages(3, chunks, schedule == "zb-v"), Reductions(overlap=True)
    lists = lower(stages, orders_of(SCHEDULES[schedule], stages, 5), reductions)
    for rank in range(3):
        steps = ProvedSchedules(stages, rank, schedule=schedule, reductions=reductions).prove([5])
        assert steps.training(5) == lists[rank]


def test_borders_with_messages_are_as_many_as_there_are() -> None:
    border = (TensorSpec("hidden"),)
    for stages, chunks, borders in ((2, 1, 1), (2, 2, 3), (1, 1, 0), (3, 2, 0)):
        Stages(stages, chunks, messages=(border,) * borders)
    for stages, chunks, borders in ((2, 1, 2), (2, 2, 1), (1, 1, 1)):
        with pytest.raises(ValueError, match=f"^{borders} borders have messages, but {stages * chunks} stages"):
            Stages(stages, chunks, messages=(border,) * borders)


def test_a_step_that_was_not_proved_is_refused() -> None:
    steps = ProvedSchedules().prove([2, 4], [4])
    assert len(steps.training(2)) < len(steps.training(4))
    with pytest.raises(ScheduleError, match="no step of 3 micro-batches was proved"):
        steps.training(3)
    with pytest.raises(ScheduleError, match="no evaluation of 2 micro-batches was proved"):
        steps.evaluation(2)


def test_a_step_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, proofs = ProvedSchedules().prove([2], [4]), list[int]()
    monkeypatch.setattr(module, "check", lambda stages, lists, micro_batches, *_, **__: proofs.append(micro_batches))
    assert steps.prove([2, 3], [4]).training(3)
    assert proofs == [3]


def test_a_list_that_is_not_the_one_proved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ProvedSchedules(Stages(2), 1).prove([3])

    def other(*arguments: object, **options: object) -> list[list[Action]]:
        return [[Action("F", 0)]]

    monkeypatch.setattr(module, "lower", other)
    with pytest.raises(
        ScheduleError, match=r"rank 1 of the pipeline: its list of the step of 3 .* is not the one that was"
    ):
        steps.training(3)


def test_no_garbage_is_collected_within_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that garbage collection is off in a proof (it would search all of torch repeatedly) and on afterwards."""
    enabled = []

    def noted(*arguments: object, **options: object) -> None:
        enabled.append(gc.isenabled())

    monkeypatch.setattr(module, "check", noted)
    ProvedSchedules().prove([1])
    assert [*enabled, gc.isenabled()] == [False, True]


def calls_of_a_proof(schedule: str, ranks: int, micro_batches: int) -> int:
    """Count the function calls of a proof: its time, on any machine."""
    steps, calls = ProvedSchedules(Stages(ranks, 2, schedule == "zb-v"), schedule=schedule), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        steps.prove([micro_batches])
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.wide
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_the_cost_of_a_proof_is_in_proportion_to_its_actions(schedule: str) -> None:
    """A proof for 32 ranks, 2 stages on each and 512 micro-batches is then a second of CPU time."""
    cost = calls_of_a_proof(schedule, 8, 32)
    assert cost < 160 * 8 * 2 * 32  # calls for each forward and its backward
    assert calls_of_a_proof(schedule, 8, 64) < 2.1 * cost
    assert calls_of_a_proof(schedule, 16, 32) < 2.2 * cost

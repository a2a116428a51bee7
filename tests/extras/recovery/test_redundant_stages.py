"""The benchmark of stages that are computed twice: the second time has the bits of the first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.next_stage import AGAIN, Placement
from benchmarks.redundant_stages import SHAPE, break_even, measure
from megalite.extras.planner.goodput import Failures
from megalite.pipeline.schedules import SCHEDULES, Kind, orders_of
from megalite.pipeline.simulator import simulate
from megalite.pipeline.stages import Stages
from tests.extras.recovery.memory import Memory
from tests.harness.rank_pool import RankPools


def on_a_rank(memory: Memory, ranks: int, flags: str) -> dict[str, Any]:
    return measure(dist.get_rank(), ranks, 3, flags, 1, memory.opened(dist.get_rank()))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.wide), 3])
def test_the_next_stage_is_computed_and_updated_bit_for_bit(ranks: int, rank_pools: RankPools, tmp_path: Path) -> None:
    """`measure` raises if an activation of a step, or a weight after eleven steps, differs from the next rank's."""
    flags = SHAPE.format(sequence=16, layers=6, hidden=16, ranks=ranks, micro_batches=3, folder=tmp_path)
    memory = Memory.of(ranks)
    found = rank_pools(ranks).run(on_a_rank, memory, ranks, flags)[0]
    memory.close()
    for number, rank in enumerate(found["ranks"]):
        following = found["ranks"][(number + 1) % ranks]
        kept = 16 * following["parameters"]  # weights, gradients and two averages in fp32; flat gradients are padded
        assert kept <= rank["next stage"] < 1.03 * kept
        assert 1 <= rank["gradients sent"] / (4 * rank["parameters"]) < 1.03
        assert rank["copy"] == 12 * rank["parameters"]


def placed(again: float, ranks: int = 2) -> tuple[list[str], list[float], float]:
    """Return the lists of all ranks with two micro-batches, what fits, and the end of the step."""
    durations: dict[str, float] = {"F": 1.0, "B": 2.0, AGAIN: again}

    def duration(stage: int, kind: Kind) -> float:
        return durations[kind]

    stages = Stages(ranks)
    placement = Placement.of(stages, orders_of(SCHEDULES["1f1b"], stages, 2), duration)
    spans = simulate(stages, placement.orders, duration)
    return [words(order) for order in placement.orders], placement.fitting, max(own[-1].end for own in spans)


def words(order: Sequence[Any]) -> str:
    return " ".join(f"{action.kind}{action.micro_batch}" for action in order)


def test_redundant_forwards_run_while_a_rank_waits_and_has_their_input() -> None:
    """Rank 0 of two waits from 2 to 4 and from 6 to 7, rank 1 from 0 to 1 and from 7 to 9, where the step ends. Of
    three ranks, all wait for long enough, but rank 1 has no input at the start.
    """
    assert placed(1.0) == (["F0 F1 W0 W1 B0 B1", "W0 F0 B0 F1 B1 W1"], [1.0, 1.0], 9.0)
    assert placed(1.5) == (["F0 F1 W0 B0 B1 W1", "F0 B0 F1 B1 W0 W1"], [0.5, 0.5], 10.5)
    orders, fitting, end = placed(1.0, ranks=3)
    assert orders[1].startswith("F0 F1 W0")
    assert orders[2].startswith("W0 W1 F0")
    assert (fitting, end) == ([1.0, 1.0, 1.0], 12.0)


def test_copies_are_as_good_as_redundancy_at_the_break_even() -> None:
    seconds = break_even(0.9, 0.0, 0.1, 1.4)
    assert Failures(1 / seconds, 0.1, 1.4).best == pytest.approx(0.9, rel=1e-6)
    assert Failures(0.5 / seconds, 0.1, 1.4).best > 0.9

"""The orders of the schedules, against torch's own tables."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

from megalite.pipeline.schedules import SCHEDULES, forward_only, orders_of
from megalite.pipeline.stages import Stages
from tests.harness.pipelines import Pipeline, every_pipeline


def _group(pipeline: Pipeline) -> int | None:
    """Return torch's size of a group: the micro-batches in as many equal rounds as they fill; None if torch refuses
    them."""
    rounds = max(1, pipeline.micro_batches // pipeline.ranks)
    return None if pipeline.micro_batches % rounds else pipeline.micro_batches // rounds


def _torchs(kind: Any, pipeline: Pipeline, group: int) -> list[list[str]]:
    """Return torch's table of each rank, without the stages and processes that its constructor needs."""
    schedule = object.__new__(kind)
    schedule._num_stages = schedule.num_stages = pipeline.stages.count
    schedule._n_microbatches = pipeline.micro_batches
    schedule.pp_group_size, schedule.n_local_stages = pipeline.ranks, pipeline.chunks
    schedule.microbatches_per_round = group
    if hasattr(schedule, "_calculate_single_rank_operations"):
        table = [schedule._calculate_single_rank_operations(rank) for rank in range(pipeline.ranks)]
    else:
        table = list(schedule._get_pipeline_order().values())
    return [[str(action) for action in order if action and "REDUCE" not in str(action)] for order in table]


def _ours(pipeline: Pipeline, group: int) -> list[list[str]]:
    orders = orders_of(SCHEDULES[pipeline.schedule], pipeline.stages, pipeline.micro_batches, group)
    return [
        [f"{pipeline.stages.stage(rank, action.chunk)}{action.kind}{action.micro_batch}" for action in order]
        for rank, order in enumerate(orders)
    ]


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        ("gpipe", torchs.ScheduleGPipe),
        ("interleaved-1f1b", torchs.ScheduleInterleaved1F1B),
        ("zb-h1", torchs.ScheduleInterleavedZeroBubble),  # of one chunk a rank
        ("zb-v", torchs.ScheduleZBVZeroBubble),
    ],
)
def test_orders_are_torchs(schedule: str, kind: Any) -> None:
    for pipeline in every_pipeline(schedule, most_micro_batches=17):  # the next beyond twice the most ranks
        group = _group(pipeline)
        if group is not None:
            assert _ours(pipeline, group) == _torchs(kind, pipeline, group), pipeline


@pytest.mark.wide
def test_1f1b_is_torchs_where_torchs_table_is_right() -> None:
    """On the last rank it counts micro-batches from 1, and with fewer micro-batches than ranks it makes some up; what
    torch executes comes from elsewhere.
    """
    for pipeline in every_pipeline("1f1b"):
        if pipeline.micro_batches >= pipeline.ranks:
            theirs = _torchs(torchs.Schedule1F1B, pipeline, pipeline.ranks)
            assert _ours(pipeline, pipeline.ranks)[:-1] == theirs[:-1], pipeline


def test_1f1b_is_interleaved_1f1b_of_one_chunk_with_a_shorter_warm_up() -> None:
    """Without interleaving a rank has as many micro-batches in flight as there are stages from it to the last."""
    orders = orders_of(SCHEDULES["1f1b"], Stages(4), 6)
    assert ["".join(action.kind for action in order) for order in orders] == [
        "FFFFBFBFBBBB",
        "FFFBFBFBFBBB",
        "FFBFBFBFBFBB",
        "FBFBFBFBFBFB",
    ]


@pytest.mark.parametrize(
    ("micro_batches", "group", "sizes"),
    [(8, 4, [4, 4]), (9, 4, [4, 5]), (11, 4, [4, 7]), (3, 4, [3]), (4, 6, [4]), (10, 6, [6, 4]), (9, 6, [9])],
)
def test_micro_batches_left_over_make_a_smaller_group_or_a_larger_last_one(
    micro_batches: int, group: int, sizes: list[int]
) -> None:
    """A last group smaller than the pipeline would leave rank 0 waiting for its own last stage."""
    (order, *_) = orders_of(forward_only, Stages(4, 2), micro_batches, group)
    expected, first = [], 0
    for size in sizes:
        expected += [(m, chunk) for chunk in (0, 1) for m in range(first, first + size)]
        first += size
    assert [(action.micro_batch, action.chunk) for action in order] == expected


def test_a_group_may_be_larger_than_the_pipeline() -> None:
    by_twos, by_fours = (orders_of(SCHEDULES["interleaved-1f1b"], Stages(2, 2), 8, group) for group in (2, 4))
    assert [a.chunk for a in by_twos[0] if a.kind == "F"] == [0, 0, 1, 1] * 4
    assert [a.chunk for a in by_fours[0] if a.kind == "F"] == [0, 0, 0, 0, 1, 1, 1, 1] * 2


@pytest.mark.parametrize("ranks", range(1, 9))
def test_evaluation_on_a_v_keeps_few_micro_batches_on_their_way(ranks: int) -> None:
    for order in orders_of(forward_only, Stages(ranks, 2, v_shaped=True), 32):
        on_their_way = [sum({0: 1, 1: -1}[action.chunk] for action in order[:end]) for end in range(len(order))]
        assert max(on_their_way) <= 2 * ranks - 1

"""Position of messages and reductions in the lists. The checker shows that the lists are correct."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.pipeline.lowering import Reductions, lower
from megalite.pipeline.schedules import Action
from megalite.pipeline.simulator import ScheduleError, durations, simulate
from megalite.pipeline.stages import Stages
from tests.harness.pipelines import REDUCTIONS, Pipeline, every_pipeline, pipelines

COMPUTATIONS = ("F", "B", "I", "W")


def _computations(actions: Sequence[Action]) -> list[Action]:
    return [action for action in actions if action.kind in COMPUTATIONS]


@settings(max_examples=40)
@given(pipeline=pipelines(), reductions=st.sampled_from(REDUCTIONS))
def test_the_orders_stay_as_they_are(pipeline: Pipeline, reductions: Reductions | None) -> None:
    assert [_computations(actions) for actions in pipeline.lists(reductions)] == pipeline.orders()


@settings(max_examples=40)
@given(pipeline=pipelines())
def test_a_message_travels_beside_a_computation(pipeline: Pipeline) -> None:
    """A receive is posted at least one computation before its use, except those that a rank begins with."""
    for actions in pipeline.lists():
        posted: dict[tuple[str, int, int], int] = {}
        count = 0
        for action in actions:
            key = action.micro_batch, action.chunk
            if action.kind in COMPUTATIONS:
                way = "receive F" if action.kind == "F" else "receive B"
                if action.kind != "W" and (way, *key) in posted:
                    assert posted.pop((way, *key)) < count or count == 0, action
                count += 1
            elif action.kind.startswith("receive"):
                posted[action.kind, *key] = count
        assert not posted


@settings(max_examples=40)
@given(pipeline=pipelines(), overlap=st.booleans())
def test_a_send_stands_behind_what_gives_it_and_is_waited_for_behind_the_next_computation(
    pipeline: Pipeline, overlap: bool
) -> None:
    for actions in lower(pipeline.stages, pipeline.orders(), overlap=overlap):
        for previous, action in pairwise(actions):
            if action.kind.startswith("send"):
                assert previous.kind in (("F",) if action.kind == "send F" else ("B", "I"))
                assert (previous.micro_batch, previous.chunk) == (action.micro_batch, action.chunk)
        computations = [index for index, action in enumerate(actions) if action.kind in COMPUTATIONS]
        for index, action in enumerate(actions):
            if action.kind.startswith("send"):
                free = action._replace(kind=action.kind.replace("send", "free"))
                between = sum(index < other < actions.index(free) for other in computations)
                assert between == (overlap and index < computations[-1])


@pytest.mark.wide
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v"])
def test_few_receives_are_posted_at_a_time(schedule: str) -> None:
    for pipeline in every_pipeline(schedule, most_micro_batches=12):
        assert max(map(_most_posted, pipeline.lists())) <= 3, pipeline


def _most_posted(actions: Sequence[Action]) -> int:
    """Return the largest number of receives that are posted at one time and whose computation has not run."""
    posted: set[tuple[str, int, int]] = set()
    most = 0
    for kind, micro_batch, chunk, _ in actions:
        if kind.startswith("receive"):
            posted.add((kind, micro_batch, chunk))
            most = max(most, len(posted))
        elif kind in COMPUTATIONS:
            posted.discard(("receive F" if kind == "F" else "receive B", micro_batch, chunk))
    return most


def test_the_turn_of_a_v_needs_no_message() -> None:
    pipeline = Pipeline("zb-v", 2, 2, 4)
    for chunk, kinds in ((0, {"receive F", "send B", "free B"}), (1, {"send F", "free F", "receive B"})):
        (last,) = pipeline.lists()[1:]
        assert {action.kind for action in last if action.chunk == chunk and action.peer is not None} == kinds


def _behind(actions: Sequence[Action]) -> list[tuple[Action, int]]:
    """Return each reduction and the number of computations before it."""
    return [(action, len(_computations(actions[:index]))) for index, action in enumerate(actions) if action.kind == "R"]


@settings(max_examples=40)
@given(pipeline=pipelines(), overlap=st.booleans(), align=st.booleans())
def test_reductions_stand_behind_the_last_gradients(pipeline: Pipeline, overlap: bool, align: bool) -> None:
    pipeline = replace(pipeline, backward=True)
    ranks = pipeline.ranks
    for rank, actions in enumerate(pipeline.lists(Reductions(overlap=overlap, align_ranks=align))):
        order = _computations(actions)
        weights = [index for index, action in enumerate(order) if action.kind in ("B", "W")]
        for reduction, behind in _behind(actions):
            last = max(index for index in weights if order[index].chunk == reduction.chunk)
            later = [index for index in weights if index > last]
            put_off = rank if align and pipeline.chunks > 1 and not pipeline.stages.v_shaped else 0
            expected = [last, *later, *[len(order) - 1] * ranks][put_off] if overlap else len(order) - 1
            assert behind == expected + 1


@settings(max_examples=40)
@given(pipeline=pipelines())
def test_each_micro_batch_may_be_reduced_by_itself(pipeline: Pipeline) -> None:
    pipeline = replace(pipeline, backward=True)
    for actions in pipeline.lists(Reductions(per_micro_batch=True)):
        reduced = [(a.micro_batch, a.chunk) for a in actions if a.kind == "R"]
        assert reduced == [(a.micro_batch, a.chunk) for a in actions if a.kind in ("B", "W")]
        assert all(_computations(actions)[behind - 1].kind in ("B", "W") for _, behind in _behind(actions))


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(2, 2, 4), (4, 2, 9), (3, 3, 7), (8, 4, 16)])
def test_aligned_ranks_reduce_a_chunk_at_one_time(ranks: int, chunks: int, micro_batches: int) -> None:
    """The first reduction is an exception: there is nothing after it to wait for."""
    pipeline = Pipeline("interleaved-1f1b", ranks, chunks, micro_batches)
    spans = simulate(pipeline.stages, pipeline.orders(), durations())

    def times(align: bool, chunk: int) -> set[float]:
        lists = pipeline.lists(Reductions(overlap=True, align_ranks=align))
        return {
            own[behind - 1].end
            for own, actions in zip(spans, lists, strict=True)
            for reduction, behind in _behind(actions)
            if reduction.chunk == chunk
        }

    for chunk in range(1, chunks):
        assert len(times(True, chunk)) == 1
        assert len(times(False, chunk)) == ranks


def test_on_a_v_reductions_are_not_put_off() -> None:
    """It would move them apart: the chunks on the way back end at 40, 48, 48 and 48, and put off at 40, 49, 50, 51."""
    pipeline = Pipeline("zb-v", 4, 2, 8)
    assert pipeline.lists(Reductions(overlap=True, align_ranks=True)) == pipeline.lists(Reductions(overlap=True))


def test_orders_that_wait_for_each_other_have_no_lists() -> None:
    orders = [[Action("B", 0), Action("F", 0)], [Action("F", 0), Action("B", 0)]]
    with pytest.raises(ScheduleError, match="rank 0 at B of micro-batch 0, chunk 0"):
        lower(Stages(2), orders)

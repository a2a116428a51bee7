"""The time line of a schedule, against the closed forms of the papers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.pipeline.schedules import Action
from megalite.pipeline.simulator import ScheduleError, bubble, durations, peak_in_flight, simulate
from megalite.pipeline.stages import Stages
from tests.harness.pipelines import Pipeline, every_pipeline

# Quarters of integers add up exactly.
TIMES = st.tuples(*[st.integers(0, 40).map(lambda quarters: quarters / 4)] * 3)


def _bubble(pipeline: Pipeline, times: tuple[float, float, float]) -> float:
    return bubble(simulate(pipeline.stages, pipeline.orders(), durations(*times)))


@settings(max_examples=40)
@given(ranks=st.integers(1, 8), micro_batches=st.integers(1, 32), times=TIMES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(
    schedule: str, ranks: int, micro_batches: int, times: tuple[float, float, float]
) -> None:
    assert _bubble(Pipeline(schedule, ranks, 1, micro_batches), times) == (ranks - 1) * sum(times)


@settings(max_examples=40)
@given(ranks=st.integers(1, 8), chunks=st.integers(1, 4), rounds=st.integers(1, 4), times=TIMES)
def test_bubble_of_interleaved_1f1b(ranks: int, chunks: int, rounds: int, times: tuple[float, float, float]) -> None:
    """`times` are a chunk's: a rank's whole forward and backward take `chunks` times as long."""
    pipeline = Pipeline("interleaved-1f1b", ranks, chunks, rounds * ranks)
    assert _bubble(pipeline, times) == (ranks - 1) * sum(times)


@settings(max_examples=40)
@given(ranks=st.integers(1, 8), more=st.integers(0, 24), times=TIMES)
def test_bubble_of_zb_h1_with_no_fewer_micro_batches_than_ranks(
    ranks: int, more: int, times: tuple[float, float, float]
) -> None:
    """The paper's form, unless the input's backward and the weights' both take longer than forward: then the gradients
    come back so slowly that each rank waits for the whole of the input's.
    """
    forward, backward_input, backward_weight = times
    expected = forward + max(backward_input - backward_weight, 0)
    if min(backward_input, backward_weight) > forward:
        expected = max(expected, backward_input)
    assert _bubble(Pipeline("zb-h1", ranks, 1, ranks + more), times) == (ranks - 1) * expected


@settings(max_examples=40)
@given(ranks=st.integers(2, 8), data=st.data(), times=TIMES)
def test_bubble_of_zb_h1_with_fewer_is_no_smaller(
    ranks: int, data: st.DataObject, times: tuple[float, float, float]
) -> None:
    few = _bubble(Pipeline("zb-h1", ranks, 1, data.draw(st.integers(1, ranks - 1))), times)
    assert _bubble(Pipeline("zb-h1", ranks, 1, ranks), times) <= few <= (ranks - 1) * sum(times)


@pytest.mark.wide
@pytest.mark.parametrize("ranks", range(1, 9))
def test_zb_v_never_idles_once_begun(ranks: int) -> None:
    """Assume equal times and enough micro-batches. The only bubble is that later ranks start later. The paper does not
    count it, because their next step starts later, too.
    """
    for micro_batches in range(2 * ranks - 1, 33):
        pipeline = Pipeline("zb-v", ranks, 2, micro_batches)
        spans = simulate(pipeline.stages, pipeline.orders(), durations())
        assert bubble(spans) == ranks - 1
        for rank, own in enumerate(spans):
            assert own[0].start == rank
            assert own[-1].end - own[0].start == 6 * micro_batches


@settings(max_examples=40)
@given(ranks=st.integers(1, 8), more=st.integers(0, 16), times=TIMES)
def test_bubble_of_zb_v_does_not_grow_with_the_micro_batches(
    ranks: int, more: int, times: tuple[float, float, float]
) -> None:
    """So its share of a step goes to nothing; and it is never more than 1F1B has in stages twice as large."""
    least = _bubble(Pipeline("zb-v", ranks, 2, 2 * ranks - 1), times)
    assert _bubble(Pipeline("zb-v", ranks, 2, 2 * ranks - 1 + more), times) == least
    assert (ranks - 1) * times[0] <= least <= 2 * (ranks - 1) * sum(times)


def _in_flight(pipeline: Pipeline, rank: int) -> int:
    """Return the number by the closed form."""
    m, ranks, chunks = pipeline.micro_batches, pipeline.ranks, pipeline.chunks
    largest_group = m if m < ranks else ranks + m % ranks
    return {
        "gpipe": m,
        "1f1b": min(ranks - rank, m),
        "interleaved-1f1b": min(2 * (ranks - 1 - rank) + (chunks - 1) * largest_group + 1, chunks * m),
        "zb-h1": min(ranks, m),
        "zb-v": 2 * ranks,
    }[pipeline.schedule]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
def test_activations_in_flight(schedule: str) -> None:
    """ZB-V keeps as much as `ranks` micro-batches of both chunks, less where so few micro-batches never fill it."""
    for pipeline in every_pipeline(schedule):
        found = [peak_in_flight(order) for order in pipeline.orders()]
        expected = [_in_flight(pipeline, rank) for rank in range(pipeline.ranks)]
        if schedule == "zb-v" and pipeline.micro_batches < 2 * pipeline.ranks:
            assert all(a <= b for a, b in zip(found, expected, strict=True)), pipeline
        else:
            assert found == expected, pipeline


def test_stages_may_differ_and_messages_take_time() -> None:
    stages = Stages(2)
    orders = Pipeline("1f1b", 2, 1, 1).orders()

    def duration(stage: int, kind: str) -> float:
        return {"F": 1.0, "B": 2.0}[kind] * (stage + 1)

    first, last = simulate(stages, orders, duration, transfer=0.5)
    assert [(span.start, span.end) for span in first] == [(0.0, 1.0), (8.0, 10.0)]
    assert [(span.start, span.end) for span in last] == [(1.5, 3.5), (3.5, 7.5)]
    assert bubble([first, last]) == 10.0 - 6.0


def test_a_message_within_a_rank_takes_no_time() -> None:
    pipeline = Pipeline("zb-v", 1, 2, 2)
    assert bubble(simulate(pipeline.stages, pipeline.orders(), durations(), transfer=9.0)) == 0


def test_orders_that_wait_for_each_other() -> None:
    """Rank 0 goes backward before it gives what rank 1 wants before it does."""
    orders = [
        [Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1)],
        [Action("F", 0), Action("F", 1), Action("B", 0), Action("B", 1)],
    ]
    message = "rank 0 at B of micro-batch 0, chunk 0; rank 1 at F of micro-batch 1, chunk 0"
    with pytest.raises(ScheduleError, match=message):
        simulate(Stages(2), orders, durations())

"""The copies of activations that are declared are proved for every schedule, and a fault in them is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from megalite.pipeline.offloading import Transfer, ahead, check_transfers, declared, proved, slots
from megalite.pipeline.schedules import Action
from megalite.pipeline.simulator import ScheduleError, peak_in_flight
from tests.harness.pipelines import CHUNKS, Pipeline, every_pipeline


@pytest.mark.wide_except("zb-v", "interleaved-1f1b")
@pytest.mark.parametrize("schedule", sorted(CHUNKS))
def test_the_copies_of_every_schedule_are_proved(schedule: str) -> None:
    for pipeline in every_pipeline(schedule, most_micro_batches=5):
        layers = [list(range(chunk + 1)) for chunk in range(pipeline.chunks)]
        for actions in pipeline.lists():
            for ends in ((), range(pipeline.chunks)):
                transfers = proved(actions, layers, ends)
                assert len(transfers) == 2 * pipeline.micro_batches * sum(map(len, layers))


@pytest.mark.parametrize("schedule", sorted(CHUNKS))
def test_a_chunk_has_as_many_slots_as_micro_batches_in_flight(schedule: str) -> None:
    for pipeline in every_pipeline(schedule, most_micro_batches=5):
        for actions in pipeline.lists():
            used = slots(actions)
            # Deferred weight gradients keep no buffers, since I has read them.
            whole = [each._replace(kind="B") if each.kind == "I" else each for each in actions if each.kind != "W"]
            for own in range(pipeline.chunks):
                sizes = [int(chunk == own) for chunk in range(pipeline.chunks)]
                count = 1 + max(slot for (chunk, _), slot in used.items() if chunk == own)
                assert count == peak_in_flight(whole, sizes)


@pytest.mark.wide_except("zb-v")
@pytest.mark.parametrize("schedule", sorted(CHUNKS))
def test_the_last_layer_comes_back_during_the_computation_before(schedule: str) -> None:
    """If there is one between forward and backward. Layers before it come back with their backward."""
    for pipeline in every_pipeline(schedule, most_micro_batches=5):
        ends = [pipeline.chunks - 1]
        layers = [[0, 1] for _ in range(pipeline.chunks)]
        for actions in pipeline.lists():
            computed = [index for index, each in enumerate(actions) if each.kind in ("F", "B", "I", "W")]
            for each in proved(actions, layers, ends):
                if each.direction == "to host":
                    continue
                before = computed[computed.index(each.before) - 1]
                own = (actions[before].chunk, actions[before].micro_batch) == (each.chunk, each.micro_batch)
                is_early = each.chunk in ends and each.layer == 1 and not own
                assert each.after == (before if is_early else each.before), f"{pipeline}: {each}"


def test_an_evaluation_copies_nothing() -> None:
    actions = Pipeline("1f1b", ranks=2, chunks=1, micro_batches=3, backward=False).lists()[0]
    assert slots(actions) == {}
    assert proved(actions, [[0, 1]]) == []


ACTIONS = [Action("F", 0), Action("F", 1), Action("B", 0), Action("F", 2), Action("B", 1), Action("B", 2)]
LAYERS = [[0, 1]]


def test_copies_begin_in_the_order_in_which_they_are_needed() -> None:
    """Copies for the backward at hand come before those for the next one."""
    assert ahead(ACTIONS, slots(ACTIONS), [0]) == {1: (0, 0), 3: (0, 1), 4: (0, 2)}
    found = [(each.direction, each.layer, each.micro_batch, each.after) for each in proved(ACTIONS, LAYERS, [0])]
    assert [each for each in found if each[0] == "to device"] == [
        ("to device", 1, 0, 1),
        ("to device", 0, 0, 2),
        ("to device", 1, 1, 3),
        ("to device", 0, 1, 4),
        ("to device", 1, 2, 4),
        ("to device", 0, 2, 5),
    ]


def early_reuse(transfers: list[Transfer]) -> list[Transfer]:
    """Give all micro-batches one slot."""
    return [transfer._replace(slot=0) for transfer in transfers]


def one_stays(transfers: list[Transfer]) -> list[Transfer]:
    return [each for each in transfers if (each.direction, each.layer, each.micro_batch) != ("to device", 0, 1)]


def never_sent(transfers: list[Transfer]) -> list[Transfer]:
    return [each for each in transfers if (each.direction, each.layer, each.micro_batch) != ("to host", 1, 2)]


def neither_way(transfers: list[Transfer]) -> list[Transfer]:
    return [each for each in transfers if (each.layer, each.micro_batch) != (1, 2)]


def late(transfers: list[Transfer]) -> list[Transfer]:
    """Let the first copy back begin in the action after the one that reads it."""
    return [
        each._replace(after=3) if (each.direction, each.micro_batch) == ("to device", 0) else each for each in transfers
    ]


def read_late(transfers: list[Transfer]) -> list[Transfer]:
    """Let the first copies back be read two actions after they begin, when the next micro-batch has their slot."""
    return [
        each._replace(before=4) if (each.direction, each.micro_batch) == ("to device", 0) else each
        for each in transfers
    ]


def of_another(transfers: list[Transfer]) -> list[Transfer]:
    """Exchange the slots of the copies back of two micro-batches."""
    return [each._replace(slot=1 - each.slot) if each.direction == "to device" else each for each in transfers]


def swapped(transfers: list[Transfer]) -> list[Transfer]:
    return [*transfers[2:4], *transfers[:2], *transfers[4:]]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (early_reuse, "copy to host of layer 0 of chunk 0, micro-batch 1, slot 0: its buffer still has micro-batch 0"),
        (one_stays, "copy to host of layer 0 of chunk 0, micro-batch 1, slot 1: it does not come back"),
        (never_sent, "copy to device of layer 1 of chunk 0, micro-batch 2, slot 0: its buffer does not have what"),
        (neither_way, "B of micro-batch 2, chunk 0: what layer 1 saved has not come back"),
        (late, "copy to device of layer 1 of chunk 0, micro-batch 0, slot 0: action 2 reads it, and action 3 begins"),
        (read_late, "copy to host of layer 0 of chunk 0, micro-batch 2, slot 0: what its buffer had of micro-batch 0"),
        (of_another, "copy to device of layer 1 of chunk 0, micro-batch 0, slot 1: its buffer does not have what"),
        (swapped, "copy to host of layer 0 of chunk 0, micro-batch 0, slot 0: it begins before an earlier one"),
    ],
)
def test_faults_are_refused(fault: Callable[[list[Transfer]], Sequence[Transfer]], message: str) -> None:
    transfers = declared(ACTIONS, LAYERS, slots(ACTIONS))
    assert check_transfers(ACTIONS, LAYERS, transfers) == transfers
    with pytest.raises(ScheduleError) as raised:
        check_transfers(ACTIONS, LAYERS, fault(transfers))
    assert message in str(raised.value)

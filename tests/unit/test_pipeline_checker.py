"""The checker accepts every schedule, and refuses lists with one fault in them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.parallel import SHAPES
from megalite.pipeline.checker import Collective, check
from megalite.pipeline.deadlock import Communicator, Program, run
from megalite.pipeline.lowering import Reductions
from megalite.pipeline.schedules import SCHEDULES, Action, Kind
from megalite.pipeline.simulator import ScheduleError
from megalite.pipeline.stages import Stages
from tests.harness.pipelines import CHUNKS, REDUCTIONS, Pipeline, every_pipeline, pipelines


def behind(pipeline: Pipeline) -> list[list[Collective]]:
    """Return the collectives after the list of each rank: the sum of a tied weight, the norm, a gather."""
    every = tuple(range(pipeline.ranks))
    ends = (0, pipeline.ranks - 1)
    tied = [Collective("sum of the tied weight", ends)] if pipeline.ranks > 1 else []
    rest = [Collective("norm", every), Collective("gather", every)]
    return [[*tied, *rest] if rank in ends else list(rest) for rank in every]


def test_every_schedule_is_proved() -> None:
    assert CHUNKS.keys() == SHAPES.keys() == SCHEDULES.keys()


@pytest.mark.parametrize("schedule", sorted(CHUNKS))
def test_every_schedule_passes(schedule: str) -> None:
    check_schedule(schedule, most_micro_batches=9)  # more than ranks


@pytest.mark.wide
@pytest.mark.parametrize("schedule", sorted(CHUNKS))
def test_every_schedule_passes_also_with_many_micro_batches(schedule: str) -> None:
    check_schedule(schedule, most_micro_batches=16)


def check_schedule(schedule: str, most_micro_batches: int) -> None:
    for pipeline in every_pipeline(schedule, most_micro_batches):
        reductions = Reductions(overlap=True, align_ranks=True)
        check(pipeline.stages, pipeline.lists(reductions), pipeline.micro_batches, reductions)


@settings(max_examples=60)
@given(pipeline=pipelines(), reductions=st.sampled_from(REDUCTIONS))
def test_every_kind_of_step_passes(pipeline: Pipeline, reductions: Reductions | None) -> None:
    check_step(pipeline, reductions)


@pytest.mark.wide
@settings(max_examples=300)
@given(pipeline=pipelines(), reductions=st.sampled_from(REDUCTIONS))
def test_many_kinds_of_steps_pass(pipeline: Pipeline, reductions: Reductions | None) -> None:
    check_step(pipeline, reductions)


def check_step(pipeline: Pipeline, reductions: Reductions | None) -> None:
    reductions = reductions if pipeline.backward else None
    check(
        pipeline.stages,
        pipeline.lists(reductions),
        pipeline.micro_batches,
        reductions,
        backward=pipeline.backward,
        after_list=behind(pipeline),
    )


@pytest.mark.parametrize("each", [False, True])
def test_a_step_without_pipelining_passes(each: bool) -> None:
    actions = Pipeline("1f1b", 1, 1, 3).lists(Reductions(per_micro_batch=each))
    check(Stages(), actions, 3, Reductions(per_micro_batch=each))


class Lists:
    """Correct step of three ranks, to be changed. `spot` finds an action of rank 1."""

    def __init__(self, schedule: str, reductions: Reductions) -> None:
        chunks = {"interleaved-1f1b": 2, "zb-v": 2}.get(schedule, 1)
        self.pipeline = Pipeline(schedule, 3, chunks, 7)
        self.reductions = reductions
        self.lists = [list(actions) for actions in self.pipeline.lists(reductions)]
        self.behind = behind(self.pipeline)
        self.split = schedule.startswith("zb")
        self.backward: Kind = "I" if self.split else "B"
        self.weights: Kind = "W" if self.split else "B"

    @property
    def one(self) -> list[Action]:
        return self.lists[1]

    def spot(self, kind: Kind, micro_batch: int = 3, chunk: int = 0) -> int:
        (index,) = [
            index
            for index, action in enumerate(self.one)
            if (action.kind, action.micro_batch, action.chunk) == (kind, micro_batch, chunk)
        ]
        return index

    def move(self, index: int, to: int) -> Action:
        """Move an action of rank 1 before the action that is now at `to`."""
        action = self.one[index]
        self.one.insert(to, action)
        del self.one[index + (to <= index)]
        return action

    def check(self) -> None:
        pipeline = self.pipeline
        check(pipeline.stages, self.lists, pipeline.micro_batches, self.reductions, after_list=self.behind)


Fault = Callable[[Lists], str]
"""Change of the lists that makes them wrong; it returns the expected message."""


def lost(kind: Kind, noticed: str) -> Fault:
    def fault(lists: Lists) -> str:
        del lists.one[lists.spot(kind)]
        return noticed.replace("BACKWARD", lists.backward)

    return fault


def doubled(kind: Kind) -> Fault:
    def fault(lists: Lists) -> str:
        index = lists.spot(kind)
        lists.one.insert(index + 1, lists.one[index])
        return f"rank 1 at {lists.one[index]}"

    return fault


def wrong(kind: Kind, **change: Any) -> Fault:
    def fault(lists: Lists) -> str:
        index = lists.spot(kind)
        lists.one[index] = lists.one[index]._replace(**change)
        return f"rank 1 at {lists.one[index]}"

    return fault


def out_of_order(kind: Kind) -> Fault:
    def fault(lists: Lists) -> str:
        first, second = lists.spot(kind, 2), lists.spot(kind, 3)
        lists.one[first], lists.one[second] = lists.one[second], lists.one[first]
        return f"rank [012] at .*{kind}|rank 1 at {'F' if kind == 'receive F' else lists.backward} of micro-batch 2"

    return fault


def before(kind: Kind, other: Kind) -> Fault:
    """Return a fault: an action directly before one that it must follow."""

    def fault(lists: Lists) -> str:
        action = lists.move(lists.spot(kind), lists.spot(other))
        return f"rank 1 at {action}"

    return fault


def receive_behind_its_use(lists: Lists) -> str:
    lists.move(lists.spot("receive F"), lists.spot("F") + 1)
    return "rank 1 at F of micro-batch 3, chunk 0"


def receives_behind_sends(lists: Lists) -> str:
    """Put each receive directly before its use: ranks send to each other and have not posted the receives."""
    for rank, actions in enumerate(lists.lists):
        receives = {(a.kind, a.micro_batch, a.chunk): a for a in actions if a.kind.startswith("receive")}
        late: list[Action] = []
        for action in actions:
            if action.kind in ("F", "B", "I"):
                receive = f"receive {'F' if action.kind == 'F' else 'B'}"
                late += [a for key, a in receives.items() if key == (receive, action.micro_batch, action.chunk)]
            late += [] if action.kind.startswith("receive") else [action]
        lists.lists[rank] = late
    return "if a send waits for its receive: rank 0 at send F .* waits for rank 1; .* waits for rank|rank 0 .* meets"


def backward_before_its_forward(lists: Lists) -> str:
    first, second = lists.spot("F"), lists.spot(lists.backward)
    actions = lists.one
    actions[first], actions[second] = actions[second], actions[first]
    return f"rank 1 at {lists.backward} of micro-batch "


def backward_out_of_order(lists: Lists) -> str:
    first, second = lists.spot(lists.backward, 2), lists.spot(lists.backward, 3)
    lists.one[first], lists.one[second] = lists.one[second], lists.one[first]
    return f"rank 1 at {lists.backward} of micro-batch 3.*: micro-batch 2 of this chunk has not had its backward"


def weights_out_of_order(lists: Lists) -> str:
    first, second = lists.spot("W", 2), lists.spot("W", 3)
    lists.one[first], lists.one[second] = lists.one[second], lists.one[first]
    return "rank 1 at W of micro-batch 3"


def reduced_before_the_last_weights(lists: Lists) -> str:
    lists.move(lists.spot("R", 6), lists.spot(lists.weights, 6))
    return "rank 1 at R of micro-batch 6.*: its weight gradients have not been given"


def reduction_lost(lists: Lists) -> str:
    del lists.one[lists.spot("R", 6)]
    return "rank 1: R of micro-batch 6.* is missing"


def reduction_doubled(lists: Lists) -> str:
    lists.one.append(lists.one[lists.spot("R", 6)])
    return "rank 1 at R of micro-batch 6.*: it has been done before"


def reduced_behind_another(lists: Lists) -> str:
    lists.one.insert(lists.spot(lists.weights, 2) + 1, Action("R", 2))
    return "rank 1 at R of micro-batch 2"


def last_micro_batch_lost(lists: Lists) -> str:
    for rank, actions in enumerate(lists.lists):
        lists.lists[rank] = [a for a in actions if a.micro_batch < 6 or a.kind == "R"]
    return "rank 0 at R of micro-batch 6|rank 0: F of micro-batch 6.* is missing"


def collectives_in_another_order(lists: Lists) -> str:
    lists.behind[2].reverse()
    return "rank [012] at .*meets rank [012] at|waits for"


def sum_of_the_tied_weight_lost(lists: Lists) -> str:
    lists.behind[2] = [collective for collective in lists.behind[2] if collective.name != "sum of the tied weight"]
    return "rank 0 at sum of the tied weight meets rank 2 at its end"


FAULTS: dict[str, Fault] = {
    "a forward and its backward swapped": backward_before_its_forward,
    "F lost": lost(
        "F", "rank 1 at send F of micro-batch 3, chunk 0 to rank 2 .*: the action that produces it has not been done"
    ),
    "F doubled": doubled("F"),
    "receive F lost": lost(
        "receive F", "rank 1 at F of micro-batch 3, chunk 0 .*: the receive of its message has not been posted"
    ),
    "receive B lost": lost(
        "receive B", "rank 1 at BACKWARD of micro-batch 3, chunk 0 .*: the receive of its message has not been posted"
    ),
    "receive F doubled": doubled("receive F"),
    "receives of activations in another order": out_of_order("receive F"),
    "receives of gradients in another order": out_of_order("receive B"),
    "a receive posted behind its use": receive_behind_its_use,
    "all receives posted behind sends": receives_behind_sends,
    "receive from a wrong peer": wrong("receive F", peer=2),
    "receive for a wrong micro-batch": wrong("receive F", micro_batch=7),
    "send F lost": lost("send F", "rank 1 at free F of micro-batch 3, chunk 0 to rank 2 .*: its send has not started"),
    "send B lost": lost("send B", "rank 1 at free B of micro-batch 3, chunk 0 to rank 0 .*: its send has not started"),
    "send F doubled": doubled("send F"),
    "send B doubled": doubled("send B"),
    "send F before F": before("send F", "F"),
    "sends of activations in another order": out_of_order("send F"),
    "sends of gradients in another order": out_of_order("send B"),
    "send F to a wrong peer": wrong("send F", peer=0),
    "send B to a wrong peer": wrong("send B", peer=1),
    "F of a chunk that is not there": wrong("F", chunk=2),
    "a buffer freed before its send": before("free F", "send F"),
    "free F lost": lost("free F", "rank 1: free F of micro-batch 3, chunk 0 .* is missing"),
    "free F doubled": doubled("free F"),
    "a gradient freed before its send": before("free B", "send B"),
    "free B lost": lost("free B", "rank 1: free B of micro-batch 3, chunk 0 .* is missing"),
    "backward of micro-batches in another order": backward_out_of_order,
    "R before the last weight gradients": reduced_before_the_last_weights,
    "R lost": reduction_lost,
    "R doubled": reduction_doubled,
    "R behind another micro-batch": reduced_behind_another,
    "the last micro-batch lost everywhere": last_micro_batch_lost,
    "collectives in another order on one rank": collectives_in_another_order,
    "the sum of a tied weight lost on one rank": sum_of_the_tied_weight_lost,
}
FAULTS_OF_SPLIT_BACKWARD: dict[str, Fault] = {
    "W before I": before("W", "I"),
    "W lost": lost(
        "W", "rank 1 at W of micro-batch 4, chunk 0 .*: the weight gradients of micro-batch 3 of this chunk have not"
    ),
    "I lost": lost(
        "I", "rank 1 at send B of micro-batch 3, chunk 0 to rank 0 .*: the action that produces it has not been done"
    ),
    "W doubled": doubled("W"),
    "weight gradients in another order": weights_out_of_order,
}


def _refused(lists: Lists, fault: Fault) -> None:
    lists.check()
    expected = fault(lists)
    with pytest.raises(ScheduleError) as error:
        lists.check()
    assert re.search(expected, str(error.value)), f"{expected!r} is not in {error.value}"


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(schedule: str, fault: str) -> None:
    _refused(Lists(schedule, Reductions(overlap=True)), FAULTS[fault])


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
@pytest.mark.parametrize("fault", FAULTS_OF_SPLIT_BACKWARD)
def test_faults_of_a_split_backward_are_refused(schedule: str, fault: str) -> None:
    _refused(Lists(schedule, Reductions(overlap=True)), FAULTS_OF_SPLIT_BACKWARD[fault])


def test_evaluation_does_not_go_backward() -> None:
    pipeline = Pipeline("1f1b", 2, 1, 3)
    with pytest.raises(ScheduleError, match=r"rank 0 at B of micro-batch 0.*evaluation has no backward"):
        check(pipeline.stages, pipeline.lists(), 3, backward=False)
    with pytest.raises(ScheduleError, match=r"rank 0: B of micro-batch 0, chunk 0 \(stage 0\) is missing"):
        check(pipeline.stages, replace(pipeline, backward=False).lists(), 3)


def test_reductions_that_nobody_asked_for() -> None:
    pipeline = Pipeline("1f1b", 2, 1, 3)
    with pytest.raises(ScheduleError, match=r"rank 0 at R of micro-batch 2.*none is due"):
        check(pipeline.stages, pipeline.lists(Reductions()), 3)


def test_a_reduction_behind_the_next_micro_batch() -> None:
    """The reduction would include its gradients."""
    lists = Lists("1f1b", Reductions(per_micro_batch=True))
    lists.check()
    lists.move(lists.spot("R"), lists.spot("R", 4))
    with pytest.raises(ScheduleError, match=r"rank 1 at R of micro-batch 3.*the next micro-batch has given"):
        lists.check()


def test_ranks_without_lists() -> None:
    pipeline = Pipeline("1f1b", 2, 1, 3)
    with pytest.raises(ScheduleError, match="3 lists are not those of a pipeline of 2 ranks"):
        check(pipeline.stages, [*pipeline.lists(), []], 3)


def test_collectives_that_wait_in_a_ring() -> None:
    """Every communicator sees one order, but each rank waits for the next."""
    pipeline = Pipeline("gpipe", 3, 1, 1)
    rings = [[(0, 1), (0, 2)], [(1, 2), (0, 1)], [(0, 2), (1, 2)]]
    behind = [[Collective(f"sum over {ranks}", ranks) for ranks in ring] for ring in rings]
    with pytest.raises(
        ScheduleError, match=r"rank 0 at sum over \(0, 1\) waits for rank 1; rank 1 at sum over \(1, 2\)"
    ):
        check(pipeline.stages, pipeline.lists(), 1, after_list=behind)


def test_a_collective_of_others() -> None:
    pipeline = Pipeline("gpipe", 2, 1, 1)
    behind = [[Collective("norm", (1,))], [Collective("norm", (1,))]]
    with pytest.raises(ScheduleError, match="rank 0 at norm is not a member of"):
        check(pipeline.stages, pipeline.lists(), 1, after_list=behind)


def test_two_that_send_to_each_other_before_they_receive_never_end() -> None:
    """Each send waits for its receive, if the backend does not buffer."""
    edges = Communicator((0, 1), edge=True), Communicator((1, 0), edge=True)
    programs = [Program("rank 0"), Program("rank 1")]
    for program, (there, back) in zip(programs, (edges, edges[::-1]), strict=True):
        program.wait(there, program.begin(there, "x", "its send"), "its send")
        program.begin(back, "x", "its receive")
    with pytest.raises(ScheduleError, match="rank 0 at its send waits for rank 1; rank 1 at its send waits for rank 0"):
        run(programs)

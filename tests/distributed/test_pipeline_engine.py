"""The engine on real ranks: a pipeline gives the same bits as a loop over its modules.

This holds for any schedule, overlap and last operation of a stage. The engine keeps no more than necessary.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time

import pytest
import torch
from torch import Tensor

from megalite.pipeline.lowering import lower
from megalite.pipeline.point_to_point import make_links
from megalite.pipeline.schedules import SCHEDULES, orders_of
from megalite.pipeline.simulator import peak_in_flight
from tests.distributed.pipeline_run import (
    FACTOR,
    FACTORS,
    FREED,
    LAST,
    Case,
    Found,
    Gradients,
    Layer,
    alone,
    loss_of,
    make_engine,
    pipeline_mesh,
    trained,
)
from tests.harness.close import assert_bits_equal
from tests.harness.fork_server import RankFailure
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

PIPELINES = [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3), ("zb-h1", 1), ("zb-v", 2)]
ENDS = [*LAST, "its input"]
"""Last operations of stages."""


def turned(start: int) -> tuple[str, ...]:
    """Return the last operations of stages, in a different order for each case."""
    start %= len(ENDS)
    return (*ENDS[start:], *ENDS[:start])


def run(rank_pools: RankPools, ranks: int, cases: list[Case]) -> list[tuple[Case, Found, list[Found]]]:
    """Return, per case, the results of a loop on one process and the results of the ranks."""
    by_rank = rank_pools(ranks).run(trained, cases)
    return [(case, alone(case, ranks), [found[i] for found in by_rank]) for i, case in enumerate(cases)]


def assert_as_alone(case: Case, expected: Found, ranks: list[Found]) -> None:
    """Assert the same bits of losses, gradients and evaluation."""
    assert sum(found.loss for found in ranks) == expected.loss, case
    assert sum(found.evaluated for found in ranks) == expected.loss, case
    gradients = {place: gradient for found in ranks for place, gradient in found.gradients.items()}
    assert gradients.keys() == expected.gradients.keys()
    for place, gradient in expected.gradients.items():
        if gradient is None:
            assert gradients[place] is None, (case, place)
        else:
            assert_bits_equal(gradients[place], gradient, f"{place} of {case}")


def assert_tidy(case: Case, ranks: list[Found]) -> None:
    """Assert that sent tensors do not change, sends are waited for, and nothing outlives the step."""
    for found in ranks:
        links = found.links
        assert links["changed"] == 0, case
        assert links["waited_for"] == links["sent"], case
        assert links["most_under_way"] <= (2 if case.overlap else 1), case
        assert found.alive_behind == 0, case


@pytest.mark.bits
@pytest.mark.parametrize("half", wide_except([0, 1], [0]))
@pytest.mark.parametrize("ranks", wide_except([2, 3, 4], [3]))
def test_a_pipeline_gives_the_bits_of_a_loop(ranks: int, half: int, rank_pools: RankPools) -> None:
    """Each half has two of the sizes of each pipeline, in turn."""
    sizes = itertools.product(PIPELINES, ((1, True), (3, True), (8, True), (4, False)))
    cases = [
        Case(schedule, chunks, micro_batches, turned(number), overlap)
        for number, ((schedule, chunks), (micro_batches, overlap)) in enumerate(sizes)
        if (number + number // 4) % 2 == half
    ]
    cases += [Case("interleaved-1f1b", 2, 8, turned(ranks), group=ranks + 1)]
    for case, expected, found in run(rank_pools, ranks, cases):
        assert_as_alone(case, expected, found)
        assert_tidy(case, found)


@pytest.mark.wide
def test_interleaved_on_two_ranks_without_overlap_is_right(rank_pools: RankPools) -> None:
    """If both neighbours of a rank are the same rank, messages in the two directions could be confused."""
    cases = [
        Case("interleaved-1f1b", chunks, micro_batches, ("tanh", "sum"), overlap=False)
        for chunks in (2, 3)
        for micro_batches in (2, 4, 7)
    ]
    for case, expected, found in run(rank_pools, 2, cases):
        assert_as_alone(case, expected, found)


@pytest.mark.wide
@pytest.mark.parametrize("end", wide_except(ENDS, ["sum", "tanh", ENDS[-1], ENDS[-2]]))
def test_a_stage_may_end_in_any_operation(end: str, rank_pools: RankPools) -> None:
    """A stage's output is freed after it has arrived, unless the stage's backward reads it."""
    cases = [Case(schedule, chunks, 3, (end,)) for schedule, chunks in (("1f1b", 1), ("interleaved-1f1b", 2))]
    for case, expected, ranks in run(rank_pools, 3, cases):
        assert_as_alone(case, expected, ranks)
        assert_tidy(case, ranks)
        for found in ranks:
            for stage, freed in found.freed.items():
                sent = stage < 3 * case.chunks - 1
                if end == "custom function that saves its output now and then":
                    assert sent or not any(freed)
                elif end != "its input":
                    assert freed == [sent and end in FREED] * 3, (case, stage)


def test_a_send_may_be_waited_for_behind_the_outputs_backward(rank_pools: RankPools) -> None:
    """This happens with one micro-batch, whose backward is the next computation."""
    for case, expected, found in run(rank_pools, 2, [Case("1f1b", 1, 1, ("tanh",))]):
        assert_as_alone(case, expected, found)
        assert_tidy(case, found)


def test_weight_gradients_that_are_put_off_are_added_once(rank_pools: RankPools) -> None:
    for case, expected, found in run(rank_pools, 2, [Case("zb-h1", 1, 4, ("tanh",)), Case("zb-v", 2, 4, ("tanh",))]):
        assert_as_alone(case, expected, found)


def test_inputs_live_until_their_backward(rank_pools: RankPools) -> None:
    """So do checkpointed activations, on all ranks but the first."""
    for case, _, ranks in run(rank_pools, 3, [Case("1f1b", 1, 8, ("sum",)), Case("gpipe", 1, 8, ("sum",))]):
        wanted = {"1f1b": [2, 1], "gpipe": [8, 8]}[case.schedule]
        assert [found.most_inputs for found in ranks[1:]] == wanted


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [pytest.param(*case, marks=[pytest.mark.wide] * (number % 2)) for number, case in enumerate(PIPELINES)],
)
def test_activations_are_as_many_as_the_lists_say(schedule: str, chunks: int, rank_pools: RankPools) -> None:
    cases = [Case(schedule, chunks, micro_batches, ("sum", "tanh")) for micro_batches in (1, 3, 8)]
    for case, _, ranks in run(rank_pools, 3, cases):
        stages = case.stages(3)
        lists = lower(stages, orders_of(SCHEDULES[schedule], stages, case.micro_batches))
        assert [found.most_alive for found in ranks] == [peak_in_flight(actions) for actions in lists], case


# ------------------------------------------------------------------------------------------------ ranks that fail


def step_of_failing_rank(number: int, failing: int, seconds: float) -> str:
    """Run a step in which one rank gets a signal in its second forward; return its message. Before, other ranks are
    late."""
    mesh = pipeline_mesh(seconds=2.0)
    case = Case("1f1b", 1, 4, ("sum",))
    stages = case.stages(mesh.world_size)
    layer = case.layer(mesh.rank, stages)
    engine, steps = make_engine(mesh, case, [layer], make_links(mesh, stages))
    forwards = itertools.count()

    def fail() -> None:
        if next(forwards) == 1:
            if mesh.rank == failing:
                os.kill(os.getpid(), number)
            time.sleep(seconds)

    layer.before_forward = fail
    engine.run(steps.training(4), case.inputs(), FACTORS, Gradients([layer]))
    return "a whole step"


@pytest.mark.parametrize(
    ("number", "seconds"),
    [(signal.SIGKILL, 0.0), (signal.SIGKILL, 0.5), pytest.param(signal.SIGSTOP, 0.0, marks=pytest.mark.wide)],
    ids=["killed", "killed before the others turn to it", "stopped"],
)
@pytest.mark.parametrize(
    "failing", [pytest.param(0, marks=pytest.mark.wide), 1, pytest.param(2, marks=pytest.mark.wide)]
)
def test_the_neighbours_of_a_rank_that_fails_name_stage_and_action(
    number: int, seconds: float, failing: int, rank_pools: RankPools
) -> None:
    with pytest.raises(RankFailure) as caught:
        rank_pools(3).run_within(30.0, step_of_failing_rank, number, failing, seconds)
    neighbours = {failing - 1, failing + 1} & {0, 1, 2}
    said = {rank: error.strip().splitlines()[-1] for rank, error in caught.value.failures.items() if rank != failing}
    assert said.keys() & neighbours
    for rank in said:
        assert re.search(
            rf"CommunicationError: stage {rank}, .* of micro-batch \d, chunk 0.*: waited .*another rank has ended",
            said[rank],
        )


# ------------------------------------------------------------------------------------------------ a slow receiver


class Wide(Layer):
    """Layer that sends more than sockets can buffer for a busy receiver."""

    def forward(self, hidden: Tensor | None, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        if hidden is None:
            return x[:, :1] * torch.arange(WIDE, dtype=torch.float64) * self.weight[0, 0]
        return (hidden * self.weight[0, 0]).sum() if self.is_last else hidden * self.weight[0, 0] + 1


WIDE = 1 << 19


def wide_step(ranks_seconds: list[float]) -> tuple[float, float]:
    mesh = pipeline_mesh()
    case = Case("1f1b", 1, 3, ("sum",))
    stages = case.stages(mesh.world_size)
    layer = Wide(mesh.rank, stages.count, "sum")
    layer.seconds = ranks_seconds[mesh.rank]
    engine, steps = make_engine(mesh, case, [layer], make_links(mesh, stages), WIDE)
    loss = loss_of(engine.run(steps.training(3), case.inputs(), FACTORS, Gradients([layer])))
    assert layer.weight.grad is not None
    return loss, layer.weight.grad[0, 0].item()


@pytest.mark.wide
def test_an_output_is_not_freed_while_a_slow_receiver_takes_it(rank_pools: RankPools) -> None:
    slow, quick = (rank_pools(2).run(wide_step, seconds) for seconds in ([0.0, 0.1], [0.0, 0.0]))
    assert slow == quick
    weights = [Wide(stage, 2, "sum").weight[0, 0].item() for stage in (0, 1)]
    sums = sum(x[:, 0].sum().item() for x in Case("1f1b", 1, 3, ("sum",)).inputs()) * WIDE * (WIDE - 1) / 2
    assert sum(loss for loss, _ in slow) == pytest.approx(sums * weights[0] * weights[1])
    for (_, gradient), other in zip(slow, reversed(weights), strict=True):
        assert gradient == pytest.approx(FACTOR * sums * other)

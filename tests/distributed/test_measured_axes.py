"""Bytes and waits by the axis of the mesh, and whose memory and waits are the largest, on worlds of two to four."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.lifecycle.launch import locate
from megalite.process.place import Place
from megalite.run.timing import gather_timing
from megalite.training.data import open_data
from megalite.training.trainer import Trainer
from megalite.watchdog.sections import STEP, Sections
from tests.distributed.test_trainer import FLAGS
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools

# In float64: a micro-batch of 12 tokens of 16 numbers, and the ring's share of the norm's sums of squares.
HIDDEN, NORM = 12 * 16 * 8, {2: 1728, 3: 1728 * 2 * 2 // 3, 4: 1728 * 2 * 3 // 4}
UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS = "--num-experts 2 --ep 2 --moe-router-topk 1 --moe-router-pre-softmax --moe-router-load-balancing-type none"


def trainer_of(flags: str) -> Trainer:
    place = Place(dist.get_rank(), 0, dist.get_world_size())
    config = resolve(parse_arguments(f"{FLAGS} {flags}".split()).config, place.world_size)
    return gpt_trainer(config, open_data(config), locate(config.parallel, place))


def sent_in_a_step(flags: str) -> tuple[int, dict[str, int], int]:
    """Return the bytes that this rank sends in a step, in all and by axis, and those of its dense gradients."""
    trainer = trainer_of(flags)
    with trainer.loader:
        step = trainer.step()
    by_axis = {name: int(sent) for name, sent in step.extra.items() if name.startswith("bytes_sent/")}
    dense = [bucket for bucket in trainer.optimizer.buckets if not bucket.slots[0].parameter.sharding.expert]
    return step.bytes_sent, by_axis, sum(8 * bucket.length for bucket in dense)


def axes(ranks: int, **sent: int) -> dict[str, int]:
    return {f"bytes_sent/{axis}": count for axis, count in (sent | {"world": NORM[ranks]}).items()}


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(4, "--cp 2"), (2, "--tp 2"), (2, "--cp 2"), (2, ""), (2, EXPERTS), (3, f"--num-layers 3 --pp 3 {UNTIED}")],
    ids=["dp+cp", "tp", "cp", "dp", "ep", "pp"],
)
def test_bytes_of_an_axis_are_what_its_ranks_exchange(ranks: int, flags: str, rank_pools: RankPools) -> None:
    for rank, (sent, by_axis, gradients) in enumerate(rank_pools(ranks).run(sent_in_a_step, flags)):
        assert sum(by_axis.values()) == sent
        if flags == "--tp 2":  # four sums a layer, those of embedding and output, and statistics of the loss
            assert by_axis == axes(2, tp=4 * (2 * 4 + 2) * HIDDEN + 4 * 2 * 12 * 8)
        elif ranks == 4:  # keys and values of two micro-batches; the sums over dp and cp count as dp, and
            # the largest and the mean attention over dp
            assert by_axis == axes(4, cp=2 * 2 * 3 * HIDDEN // 2, dp=2 * gradients * 3 // 4 + 2 * 8 * 2 * 3 // 4 + 16)
        elif flags == "--cp 2":  # keys and values twice, and their gradients; the gradients once; two counts
            assert by_axis == axes(2, cp=4 * 2 * 3 * HIDDEN // 2 + gradients + 2 * 8)
        elif not flags:
            assert by_axis == axes(2, dp=gradients + 2 * 8)
        elif flags == EXPERTS:  # a layer's tokens and results and their gradients; scores, choices, gradients of scores
            assert by_axis["bytes_sent/ep"] == 2 * 2 * (4 * HIDDEN + 3 * 12 * 8)
            assert by_axis["bytes_sent/dp"] >= gradients  # dense ranks are those of ep, and are told apart
        else:
            assert by_axis == axes(3, pp=4 * HIDDEN * (2 if rank == 1 else 1) + 8 * 2 * 2 // 3)


def test_two_axes_are_counted_apart(rank_pools: RankPools) -> None:
    for rank, (sent, by_axis, _) in enumerate(rank_pools(4).run(sent_in_a_step, f"--tp 2 --pp 2 {UNTIED}")):
        assert sum(by_axis.values()) == sent
        statistics = 4 * 2 * 12 * 8 if rank >= 2 else 0  # of the loss, on the last stage
        assert by_axis == axes(4, tp=4 * 5 * HIDDEN + statistics, pp=4 * HIDDEN + 8)


def waits_for(slow: int, flags: str) -> dict[str, float]:
    """Return the figures of a second step in whose passes the rank `slow` stands still for half a second."""
    trainer = trainer_of(flags)
    mesh, run = trainer.mesh, trainer.engine.run
    sections = trainer.sections = Sections(mesh.waits.by_axis)

    def late(*arguments: object) -> object:
        time.sleep(0.5 * (mesh.rank == slow))
        return run(*arguments)  # type: ignore[arg-type]

    with trainer.loader:
        trainer.step()
        sections.take()
        trainer.engine.run = late  # type: ignore[assignment,method-assign]
        with sections(STEP):
            trainer.step()
    return gather_timing(sections.take(), 1, mesh).figures()


def test_ranks_with_and_without_experts_gather_the_same_axes(rank_pools: RankPools) -> None:
    """Stages with experts communicate over groups that others never make."""
    flags = "--pp 2 --cp 2 --num-experts 4 --moe-layer-freq [0,1] --etp 2 --moe-router-topk 1"
    figures, *others = rank_pools(4).run(waits_for, 4, f"{flags} --moe-router-pre-softmax {UNTIED}")
    assert all(each == figures for each in others)
    assert {key for key in figures if key.startswith("wait_s/") and key.count("/") == 1} == {
        "wait_s/cp", "wait_s/pp", "wait_s/world",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "axis", "flags"),
    [
        (3, "pp", f"--num-layers 3 --pp 3 {UNTIED}"),
        *(pytest.param(*case, marks=pytest.mark.wide) for case in ((2, "dp", ""), (2, "tp", "--tp 2"))),
    ],
)
def test_a_slow_rank_is_the_others_wait_on_its_axis(ranks: int, axis: str, flags: str, rank_pools: RankPools) -> None:
    slow = ranks - 1
    figures, *others = rank_pools(ranks).run(waits_for, slow, flags)
    assert all(each == figures for each in others)
    assert figures[f"wait_s/{axis}/max_rank"] != slow
    assert figures[f"wait_s/{axis}/min_rank"] == slow
    assert figures[f"wait_s/{axis}/max"] > 0.4
    assert figures["wait_s/world/max"] < 0.25  # it is not all that ranks wait for
    assert figures["iteration_time_s/waiting_for_others"] >= figures[f"wait_s/{axis}"]
    assert 0.0 <= figures["communication_share"] <= 1.0 - figures["scaling_efficiency"] < 1.0
    assert figures["peak_memory_bytes/max_rank"] in range(ranks)

"""Elastic runs go on with fewer nodes, and with more once they are back: the same samples, and the same losses."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import cast

import pytest

from megalite.data.sampler import equal_deal
from megalite.extras.recovery import spares as spares_module
from megalite.extras.recovery.forks import Launched
from megalite.extras.recovery.lines import Lines
from megalite.extras.recovery.replanning import Replanning
from megalite.extras.recovery.spares import Seats
from megalite.process.place import Place
from megalite.training.unequal_shares import EvenShares
from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, metrics, words
from tests.extras.recovery.nodes import RANKS, nodes
from tests.extras.recovery.processes import until
from tests.harness.job import Job
from tests.unit.test_config_validate import problems

SAVED = "--warm-restart --elastic --save run --resume auto --global-batch-size 8"
FLAGS = (
    *MOCK, *GPT2, *words("--use-distributed-optimizer --global-batch-size 16 --eval-iters 0 --lr-decay-style constant"),
    *words("--train-iters 100000 --save-interval 1000 --deterministic-mode --bitwise-elastic"),
)  # fmt: skip
WARM = words("--resume auto --warm-restart --elastic --memory-checkpoint-interval 1")


def steps(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def spares_of(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    replica_ranks: int,
    replanning: Replanning | None = None,
) -> spares_module.Spares:
    monkeypatch.setattr(spares_module, "fork_caller", lambda *_: (None, 0))
    hello = {"spare_nodes": 0, "replica_ranks": replica_ranks, "save": str(folder)}
    first = Launched(lines=cast(Lines, None), hello=hello, place=Place(0, 0, 2 * nodes, 2))
    spares = spares_module.Spares(first, set())
    spares.replanning = replanning
    for node in range(nodes):
        spares.mark_present([2 * node, 2 * node + 1], f"n{node}")
    return spares


def test_seats_are_a_multiple_and_at_most_those_of_the_start() -> None:
    seats = Seats(nodes=6, spare=1, multiple=1)
    assert (seats.resize(), seats.nodes, seats.room) == (False, [0, 1, 2, 3, 4], 5)
    seats.absent.update({1, 2})
    assert (seats.resize(), seats.nodes, seats.fill()) == (True, [0, 3, 4, 5], [])
    seats.absent.clear()
    assert (seats.resize(), seats.nodes, seats.free) == (True, [0, 1, 3, 4, 5], [2])


def test_nodes_beyond_whole_replicas_wait() -> None:
    seats = Seats(nodes=6, spare=0, multiple=2)
    seats.absent.add(1)
    assert (seats.resize(), seats.nodes, seats.free) == (True, [0, 2, 3, 4], [5])
    seats.absent.add(2)
    assert (seats.resize(), seats.fill(), seats.nodes) == (False, [(1, 2, False)], [0, 5, 3, 4])
    seats.absent.update({3, 4, 5})
    assert (seats.room, seats.resize(), seats.missing) == (0, False, [1, 2, 3])


def test_the_number_of_seats_stays_without_elastic() -> None:
    seats = Seats(nodes=3, spare=0)
    seats.absent.add(1)
    assert (seats.resize(), seats.missing) == (False, [1])


def test_a_sick_node_gets_a_seat_last_but_for_node_0() -> None:
    seats = Seats(nodes=4, spare=0, multiple=3)
    seats.sick.update({0, 1})
    seats.nodes = [0, 1, 2]
    assert seats.room == 3
    seats = Seats(nodes=5, spare=0, multiple=3)
    seats.sick.update({0, 1})
    seats.absent.add(4)
    assert (seats.resize(), seats.nodes) == (True, [0, 2, 3])


def test_too_few_nodes_for_a_replica_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spares = spares_of(tmp_path, monkeypatch, nodes=4, replica_ranks=4)
    for node in (1, 2, 3):
        spares.mark_lost(node)
    assert spares.fill() == ""
    assert spares.missing() == (
        "n1, n2, n3 are lost, and one replica of the model needs 4 ranks: of 2 ranks that are left, 2 are missing "
        "(1 node)"
    )


def test_a_node_that_comes_and_goes_does_not_end_generations_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spares = spares_of(tmp_path, monkeypatch, nodes=3, replica_ranks=1)
    told = []
    for _ in range(5):
        spares.mark_lost(2)
        spares.mark_lost(2)  # it does not come to the next generation either
        assert spares.fill() in ("4 ranks instead of 6, on n0, n1", "")
        spares.mark_present([4, 5], "n2")
        told.append(spares.growth(2))
        if told[-1]:
            assert spares.fill() == "6 ranks instead of 4, on n0, n1, n2"
    assert told == ["n2 is back"] * 3 + [""] * 2


@pytest.mark.parametrize("micro_batches", [3, 8, 12])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_micro_batches_are_dealt_as_equally_as_can_be(ranks: int, micro_batches: int) -> None:
    deals = [EvenShares(rank, ranks, together=1).deal(micro_batches) for rank in range(ranks)]
    counts = [len(deal.numbers) for deal in deals]
    assert max(counts) - min(counts) <= 1
    assert sorted(number for deal in deals for number in deal.numbers) == list(range(micro_batches))
    if micro_batches % ranks == 0:  # as without --elastic
        assert [list(deal.numbers) for deal in deals] == [
            list(equal_deal(rank, ranks, micro_batches).numbers) for rank in range(ranks)
        ]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (SAVED.replace("--warm-restart ", ""), "--elastic needs --warm-restart"),
        (SAVED.replace("--elastic", "--elastic-replan"), "--elastic-replan needs --elastic"),
        (SAVED.replace(" --global-batch-size 8", ""), "--elastic needs --global-batch-size: its default would change"),
        (f"{SAVED} --data-parallel-shares 3:1", "--elastic divides micro-batches itself"),
        (f"{SAVED} --gradient-compression bf16", "--elastic needs data parallelism that sums all gradients"),
        (
            f"{SAVED} --use-distributed-optimizer --num-distributed-optimizer-instances 2",
            "--elastic: --num-distributed-optimizer-inst",
        ),
        (f"{SAVED} --num-experts 2 --moe-record-routing x", "--elastic: --moe-record-routing records no empty slots"),
        (f"{SAVED} --rerun-on-replica-interval 1", "--elastic: --rerun-on-replica-interval needs replicas with equal"),
        (
            f"{SAVED} --num-layers 4 --pp 2 --num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce",
            "--elastic: data-parallel ranks with one micro-batch more",
        ),
    ],
)
def test_what_does_not_fit_another_number_of_nodes_is_refused(flags: str, expected: str) -> None:
    assert any(line.startswith(expected) for line in problems(flags)), problems(flags)


@pytest.mark.wide
def test_a_run_goes_on_with_fewer_nodes_and_with_more_once_they_are_back(tmp_path: Path) -> None:
    """On 6, 4, 6 and 4 ranks, each time from the copies in memory, with the bits of a run on two."""
    with nodes(3, tmp_path, [*FLAGS, "--save", tmp_path / "run", *WARM]) as (first, second, third):
        until(lambda: steps(tmp_path) >= 6, "no step", 120.0)
        second.lose(signal.SIGSTOP)
        first.wait_for(
            "\ngeneration 2: n1 (ranks 2, 3) does not answer any more; 4 ranks instead of 6, on n0, n2; went"
        )
        until(lambda: steps(tmp_path) >= 15, "no step", 90.0)
        second.lose(signal.SIGCONT)
        first.wait_for("\ngeneration 3: n1 is back; 6 ranks instead of 4, on n0, n1, n2; went on")
        before = steps(tmp_path)
        until(lambda: steps(tmp_path) >= before + 6, "no step", 90.0)
        third.lose()
        first.wait_for("; 4 ranks instead of 6, on n0, n1; went on")
        for ranks in (6, 4, 6):
            assert f"(of {ranks} ranks, sent to those that need them now)" in first.said()
        (tmp_path / "run" / "STOP").touch()
        assert first.launcher.wait(90) == 85, first.said()
    flags = [*FLAGS, "--exit-interval", steps(tmp_path), "--save", tmp_path / "whole"]
    with Job([PRETRAIN, *flags], 2, tmp_path / "job") as job:
        assert job.wait() == [85] * 2, job.stderr(0)
    ours, theirs = metrics(tmp_path / "run"), metrics(tmp_path / "whole")
    assert len(ours) == len(theirs) > 20
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["consumed_samples"] == other["consumed_samples"]
        assert (mine["lm_loss"], mine["grad_norm"]) == (other["lm_loss"], other["grad_norm"])


@pytest.mark.wide
def test_too_few_nodes_for_a_replica_end_the_run(tmp_path: Path) -> None:
    flags = [*FLAGS, "--tp", 2 * RANKS, "--save", tmp_path / "run", *WARM]
    with nodes(2, tmp_path, flags) as (first, second):
        until(lambda: steps(tmp_path) >= 2, "no step", 120.0)
        second.lose()
        assert first.launcher.wait(60) == 85, first.said()
    assert "error: n1 is lost, and one replica of the model needs 4 ranks: of 2 ranks that are left, 2 are missing" in (
        first.said()
    )

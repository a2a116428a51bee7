"""Spare nodes take the place of nodes that are lost or sick: the run is, to the bit, one that was not disturbed."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import cast

import pytest

from megalite.extras.recovery import spares as spares_module
from megalite.extras.recovery.forks import Launched
from megalite.extras.recovery.lines import Lines
from megalite.extras.recovery.spares import Seats
from megalite.process.place import Place
from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, metrics, words
from tests.extras.recovery.nodes import RANKS, Node, nodes
from tests.extras.recovery.processes import children_of, kill, until
from tests.harness.job import Job

STEPS = 80
FLAGS = (
    *MOCK, *GPT2, *words("--use-distributed-optimizer --global-batch-size 8 --eval-iters 0 --lr-decay-style constant"),
    *words(f"--train-iters 1000 --exit-interval {STEPS}"),
)  # fmt: skip
WARM = words("--resume auto --warm-restart --memory-checkpoint-interval 1 --spare-nodes 1")


def warm(folder: Path, *more: object) -> list[object]:
    return [*FLAGS, "--save", folder / "run", *WARM, *more]


def steps(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def assert_undisturbed(folder: Path, ranks: int) -> None:
    with Job([PRETRAIN, *FLAGS, "--save", folder / "whole"], ranks, folder / "job") as job:
        assert job.wait() == [85] * ranks, job.stderr(0)
    assert metrics(folder / "run") == metrics(folder / "whole")


def test_seats_of_lost_nodes_are_taken_first_and_by_nodes_that_are_well() -> None:
    seats = Seats(nodes=6, spare=3)
    assert (seats.nodes, seats.free, seats.fill()) == ([0, 1, 2], [3, 4, 5], [])
    seats.fail(1)
    seats.fail(1)  # twice in a row: it is sick
    seats.absent.add(2)
    seats.absent.add(3)
    assert seats.fill() == [(2, 2, False), (1, 1, True)]
    assert (seats.nodes, seats.free, seats.missing) == ([0, 5, 4], [1], [])
    seats.fail(5)
    seats.fail(None)  # a peer of the rank has failed
    seats.fail(5)
    seats.fail(4)
    seats.fail(4)
    assert seats.fill() == []  # node 1 is sick, too
    seats.absent.add(5)
    assert seats.fill() == [(1, 5, False)]
    assert (seats.nodes, seats.free) == ([0, 1, 4], [])
    seats.absent.add(1)
    assert (seats.fill(), seats.missing) == ([], [1])
    seats.absent.discard(3)  # it is back
    assert seats.fill() == [(1, 1, False)]
    assert seats.missing == []


def test_a_seat_whose_node_was_sick_and_is_lost_is_filled_once() -> None:
    seats = Seats(nodes=4, spare=2)
    seats.fail(1)
    seats.fail(1)
    seats.absent.add(1)
    assert seats.fill() == [(1, 1, False)]
    assert (seats.nodes, seats.free) == ([0, 2], [3])


def test_node_0_keeps_its_seat() -> None:
    seats = Seats(nodes=3, spare=1)
    for node in (0, 0, 0):
        seats.fail(node)
    assert seats.fill() == []


def test_a_node_that_computed_wrong_numbers_gets_no_seat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares_module, "fork_caller", lambda *_: (None, 0))
    (tmp_path / "sick_nodes.jsonl").write_text(
        '{"node": "b", "rank": 2, "why": "sticky fault in a gradient", "step": 8}\n{"node": "c\n'
    )
    first = Launched(
        lines=cast(Lines, None),
        hello={"spare_nodes": 1, "replica_ranks": 0, "save": str(tmp_path)},
        place=Place(0, 0, 6, 2),
    )
    spares = spares_module.Spares(first, set())
    for node, host in enumerate("abc"):
        spares.mark_present([2 * node, 2 * node + 1], host)
    assert spares.fill() == "c takes the place of b (ranks 2, 3), which sick_nodes.jsonl names"
    assert spares.waiting() == "spare nodes: b"


@pytest.mark.wide
def test_a_spare_node_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    with nodes(3, tmp_path, warm(tmp_path)) as (first, second, spare):
        until(lambda: steps(tmp_path) >= 10, "no step", 90.0)
        assert "spare nodes: n2" in first.said()
        (children,) = spare.tree.values()
        assert len(children) == 2  # no ranks
        done, lost_at = steps(tmp_path), time.monotonic()
        second.lose()
        first.wait_for("\ngeneration 2: ")
        print(f"{time.monotonic() - lost_at:.1f} s from the loss of the node to the next generation")
        print([line for line in first.said().splitlines() if "generation 2" in line])
        assert first.launcher.wait(90) == 85, first.said()
        assert spare.launcher.wait(90) == 85, spare.said()
    said = first.said()
    assert "n2 takes the place of n1 (ranks 2, 3), which is lost; went on after step " in said
    assert "rank 2's from its partner, rank 0" in said
    went_on = int(said.partition("went on after step ")[2].partition(",")[0])
    assert went_on >= done - 1
    assert_undisturbed(tmp_path, 2 * RANKS)


@pytest.mark.wide
def test_a_second_loss_ends_the_run(tmp_path: Path) -> None:
    """There is one spare node. The first one that is lost has only lost a process of its launcher."""
    with nodes(3, tmp_path, warm(tmp_path, "--exit-interval", 1000)) as (first, second, spare):
        until(lambda: steps(tmp_path) >= 5, "no step", 90.0)
        kill(children_of(second.launcher.pid)[1])
        first.wait_for("\ngeneration 2: rank 3's process of the launcher on n1 has ended")
        assert second.launcher.wait(30) == 85
        spare.lose()
        assert first.launcher.wait(60) == 85, first.said()
    assert "error: ranks 2, 3 cannot start: n2 is lost, and no spare node is left (" in first.said(), first.said()


@pytest.mark.wide
def test_a_spare_node_is_lost_before_it_is_needed(tmp_path: Path) -> None:
    with nodes(3, tmp_path, warm(tmp_path, "--exit-interval", 1000)) as (first, second, spare):
        until(lambda: steps(tmp_path) >= 5, "no step", 90.0)
        spare.lose()
        first.wait_for("spare node n2 does not answer any more; spare nodes: none is left")
        done = steps(tmp_path)
        until(lambda: steps(tmp_path) > done, "no step")
        second.lose()
        assert first.launcher.wait(60) == 85, first.said()
    assert "error: ranks 2, 3 cannot start: n1 is lost, and no spare node is left (" in first.said(), first.said()


@pytest.mark.wide
def test_a_node_on_which_ranks_fail_twice_is_replaced(tmp_path: Path) -> None:
    with nodes(3, tmp_path, warm(tmp_path)) as (first, second, spare):
        for generation, rank in ((2, 2), (3, 3)):
            before = steps(tmp_path)
            until(lambda least=before: steps(tmp_path) > least + 2, "no step", 90.0)  # type: ignore[misc]
            ((_, *ranks),) = second.tree.values()
            kill(ranks[rank - 1])
            first.wait_for(f"\ngeneration {generation}: rank {rank} on n1 was killed by SIGKILL")
        assert "n2 takes the place of n1 (ranks 2, 3), on which ranks have failed twice in a row" in first.said()
        ((_, *ranks),) = second.tree.values()
        assert len(ranks) == 1  # it waits now
        assert first.launcher.wait(60) == 85, first.said()
        assert [node.launcher.wait(60) for node in (second, spare)] == [85, 85]
    assert_undisturbed(tmp_path, 2 * RANKS)


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_a_run_ends_with_the_node_of_rank_0(number: int, tmp_path: Path) -> None:
    """It may host the store. If it stands still, another start of the run could have the others' places."""
    with nodes(3, tmp_path, warm(tmp_path, "--exit-interval", 1000)) as (first, second, spare):
        until(lambda: steps(tmp_path) >= 5, "no step", 90.0)
        first.lose(number)
        assert [node.launcher.wait(60) for node in (second, spare)] == [85, 85]
    assert "error: the store through which the agents of all nodes meet cannot be reached any more" in second.said()


@pytest.mark.wide
def test_a_node_that_stood_still_becomes_a_spare_one(tmp_path: Path) -> None:
    with nodes(3, tmp_path, warm(tmp_path, "--exit-interval", 100000)) as (first, second, spare):
        until(lambda: steps(tmp_path) >= 5, "no step", 90.0)
        second.lose(signal.SIGSTOP)
        first.wait_for("\ngeneration 2: ")
        second.lose(signal.SIGCONT)
        until(lambda: [len(children) for children in second.tree.values()] == [2], "it trains, or has ended")
        before = steps(tmp_path)
        until(lambda: steps(tmp_path) > before, "no step")
        spare.lose()
        first.wait_for("\ngeneration 3: ")
        assert "n1 takes the place of n2 (ranks 2, 3), which is lost" in first.said()


@pytest.mark.slow
def test_a_spare_node_may_come_late(tmp_path: Path) -> None:
    """The others wait a minute, and begin. Meanwhile they have begun again without it, too."""
    flags = warm(tmp_path, "--exit-interval", 100000)
    with nodes(3, tmp_path, flags, late=1) as started:
        first, second = started
        first.wait_for("spare nodes: none is left", 120.0)
        until(lambda: steps(tmp_path) >= 5, "no step", 90.0)
        ((_, _, rank, *_),) = second.tree.values()
        kill(rank)
        first.wait_for("\ngeneration 2: ")
        started.append(Node(2, 3, first.port, tmp_path, list(map(str, flags))))
        until(lambda: [len(children) for children in started[2].tree.values()] == [2], "it does not wait", 240.0)
        time.sleep(3.0)
        second.lose()
        first.wait_for("\ngeneration 3: ")
        assert "n2 takes the place of n1 (ranks 2, 3), which is lost" in first.said()

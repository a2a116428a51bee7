"""Runs whose nodes hold no replica any more go on in another layout, which the planner chooses: the same losses."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path
from typing import cast

import pytest

from megalite.errors import ConfigurationError
from megalite.extras.planner.replan import Replanned
from megalite.extras.recovery import launched, replanning
from megalite.extras.recovery.events import Events
from megalite.extras.recovery.forks import Launched
from megalite.extras.recovery.lines import Lines
from megalite.extras.recovery.replanning import Replanning
from megalite.process.place import Place
from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, metrics, words
from tests.extras.recovery.nodes import RANKS, Node, nodes
from tests.extras.recovery.processes import until
from tests.extras.recovery.test_elastic import FLAGS as BITWISE
from tests.extras.recovery.test_elastic import SAVED, WARM, spares_of, steps
from tests.harness.close import assert_number_close
from tests.harness.job import Job
from tests.unit.test_config_validate import config_of

FLAGS = (
    *MOCK, *GPT2, *words("--num-layers 4 --global-batch-size 8 --lr-decay-style constant --fp64"),
    *words("--train-iters 100000 --save-interval 1000 --use-distributed-optimizer"),
)  # fmt: skip
HEADS_AND_STAGES = words("--tp 2 --sequence-parallel --pp 2")


def tell_prices(first: Node) -> None:
    print(*(line for line in first.said().splitlines() if line.startswith("generation ")), sep="\n")


class Plans:
    """Layouts that are known, in place of those that a process chooses."""

    def __init__(self) -> None:
        self.plans: dict[int, dict[str, object]] = {}
        self.begun: list[int] = []

    def begin(self, nodes: int) -> None:
        self.begun.append(nodes)


def test_a_layout_is_chosen_where_no_replica_is_left_and_given_up_for_the_runs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = Plans()
    spares = spares_of(tmp_path, monkeypatch, nodes=4, replica_ranks=6, replanning=cast(Replanning, plans))
    spares.mark_lost(3)
    assert (spares.awaits_plan(), spares.fill()) == (False, "6 ranks instead of 8, on n0, n1, n2")  # a whole replica
    spares.mark_lost(1)
    assert (spares.awaits_plan(), plans.begun) == (True, [2])
    plans.plans[2] = {"nodes": 2, "flags": ["--pp", "2"], "text": "two stages"}
    assert (spares.awaits_plan(), spares.fill()) == (False, "4 ranks instead of 6, on n0, n2; two stages")
    assert (spares.flags, spares.seats.nodes, spares.missing()) == (["--pp", "2"], [0, 2], "")
    assert (spares.awaits_plan(), spares.fill()) == (False, "")  # a rank has failed
    spares.mark_lost(2)
    assert (spares.awaits_plan(), plans.begun) == (True, [2, 1])
    plans.plans[1] = {"error": "it is too small"}
    assert (spares.awaits_plan(), spares.fill()) == (False, "")
    assert spares.missing() == (
        "n2 is lost, and one replica of the model needs 6 ranks: of 2 ranks that are left, 4 are missing (2 nodes); "
        "another layout: it is too small"
    )
    spares.mark_present([2, 3], "n1")
    assert (spares.awaits_plan(), spares.growth(1)) == (False, "")  # it is known, and no replica is whole yet
    spares.mark_present([6, 7], "n3")
    assert spares.growth(3) == "n3 is back"
    assert spares.fill() == "6 ranks instead of 4, on n0, n1, n3; the layout is that of the flags again"
    assert spares.flags is None


def test_a_layout_may_use_fewer_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = Plans()
    plans.plans[3] = {"nodes": 2, "flags": [], "text": "two stages"}
    spares = spares_of(tmp_path, monkeypatch, nodes=4, replica_ranks=8, replanning=cast(Replanning, plans))
    spares.mark_lost(1)
    assert spares.fill() == "4 ranks instead of 8, on n0, n2; two stages"
    assert spares.waiting() == "spare nodes: n3"
    spares.mark_lost(2)
    plans.plans[2] = plans.plans[3]
    assert spares.fill() == "n3 takes the place of n2 (ranks 2, 3), which is lost"


@pytest.mark.parametrize("ends", [True, False], ids=["it ends", "it takes too long"])
def test_a_planner_without_an_answer_is_an_error(ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replanning, "entry_point", lambda _: lambda *_: 1 / 0 if ends else time.sleep(60))
    ours, theirs = socket.socketpair()
    hello = {"replanning_seconds": 1.0, "folder": str(tmp_path), "argv": [""], "environment": {}}
    events = Events()
    with ours, theirs:
        first = Launched(Lines(ours), hello, Place(0, 0, 4, 2))
        planned = Replanning(first, {0, 1, 2}, events, events.stop)
        planned.begin(1)
        planned.begin(1)  # it is being chosen
        events.after(45.0, "nothing comes", events.stop)
        events.run()
    assert planned.plans == {1: {"error": "the planner has ended without a layout, or took more than 1 s"}}


def test_a_planner_for_another_number_of_nodes_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {2: lambda: time.sleep(60), 1: lambda: Replanned(2, ["--tp", "1"], "TP 1")}
    monkeypatch.setattr(replanning, "entry_point", lambda _: lambda _, nodes, __: answers[nodes]())
    ours, theirs = socket.socketpair()
    hello = {"replanning_seconds": 60.0, "folder": str(tmp_path), "argv": [""], "environment": {}}
    events = Events()
    with ours, theirs:
        planned = Replanning(Launched(Lines(ours), hello, Place(0, 0, 6, 2)), {0, 1, 2}, events, events.stop)
        planned.begin(2)
        planned.begin(1)
        events.after(45.0, "nothing comes", events.stop)
        events.run()
    assert planned.plans == {1: {"nodes": 1, "flags": ["--tp", "1"], "text": "TP 1"}}


def test_bits_that_leave_no_other_layout_are_refused() -> None:
    config = config_of(f"{SAVED} --tp 2 --deterministic-mode --bitwise-elastic --elastic-replan")
    with pytest.raises(ConfigurationError, match="--elastic-replan with --bitwise-elastic changes --pipeline-model-p"):
        launched.run_warm(config, Place(0, 0, 4, 1, "localhost", 1))


def assert_undisturbed(folder: Path, flags: tuple[str, ...], ranks: int) -> None:
    """Compare with a run on so many ranks that was not disturbed."""
    flags = (*FLAGS, *flags, "--exit-interval", str(steps(folder)), "--save", str(folder / "whole"))
    with Job([PRETRAIN, *flags], ranks, folder / "job") as job:
        assert job.wait() == [85] * ranks, job.stderr(0)
    ours, theirs = metrics(folder / "run"), metrics(folder / "whole")
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["consumed_samples"] == other["consumed_samples"]
        for name in ("lm_loss", "grad_norm"):  # another layout adds in another order
            assert_number_close(mine[name], other[name], name)


@pytest.mark.wide
def test_a_run_goes_on_in_another_layout_and_in_its_own_once_the_nodes_are_back(tmp_path: Path) -> None:
    """A replica needs two nodes. Copies in memory go from 4 ranks to 2 of another layout, and back."""
    flags = [*FLAGS, *HEADS_AND_STAGES, "--save", tmp_path / "run", *WARM, "--elastic-replan"]
    with nodes(2, tmp_path, flags) as (first, second):
        until(lambda: steps(tmp_path) >= 6, "no step", 120.0)
        second.lose(signal.SIGSTOP)
        first.wait_for("\ngeneration 2: n1 (ranks 2, 3) does not answer any more; 2 ranks instead of 4, on n0; ", 180.0)
        assert "instead of TP 2 with SP x PP 2 x DP 1 (--tensor-model-parallel-size 1 " in first.said()
        before = steps(tmp_path)
        until(lambda: steps(tmp_path) >= before + 6, "no step", 90.0)
        second.lose(signal.SIGCONT)
        first.wait_for(
            "\ngeneration 3: n1 is back; 4 ranks instead of 2, on n0, n1; the layout is that of the flags again; went"
        )
        before = steps(tmp_path)
        until(lambda: steps(tmp_path) >= before + 3, "no step", 90.0)
        for ranks in (4, 2):
            assert f"(of {ranks} ranks, sent to those that need them now)" in first.said()
        tell_prices(first)
        (tmp_path / "run" / "STOP").touch()
        assert first.launcher.wait(90) == 85, first.said()
    assert_undisturbed(tmp_path, (), RANKS)


@pytest.mark.wide
def test_other_stages_give_the_same_bits(tmp_path: Path) -> None:
    """Three nodes, two and one, each time from the copies in memory."""
    flags = [*BITWISE, *words("--num-layers 6 --tp 2 --pp 3"), "--save", tmp_path / "run", *WARM, "--elastic-replan"]
    with nodes(3, tmp_path, flags) as (first, second, third):
        until(lambda: steps(tmp_path) >= 5, "no step", 120.0)
        for lost, ranks, left in (
            (third, 6, "4 ranks instead of 6, on n0, n1; "),
            (second, 4, "; 2 ranks instead of 4, on n0; "),
        ):
            before = steps(tmp_path)
            until(lambda least=before: steps(tmp_path) >= least + 3, "no step", 90.0)  # type: ignore[misc]
            lost.lose()
            first.wait_for(left, 180.0)
            first.wait_for(f"(of {ranks} ranks, sent to those that need them now)")
        before = steps(tmp_path)
        until(lambda: steps(tmp_path) >= before + 3, "no step", 90.0)
        tell_prices(first)
        (tmp_path / "run" / "STOP").touch()
        assert first.launcher.wait(90) == 85, first.said()
    flags = [*BITWISE, *words("--num-layers 6 --tp 2 --exit-interval"), steps(tmp_path), "--save", tmp_path / "whole"]
    with Job([PRETRAIN, *flags], RANKS, tmp_path / "job") as job:
        assert job.wait() == [85] * RANKS, job.stderr(0)
    ours, theirs = metrics(tmp_path / "run"), metrics(tmp_path / "whole")
    assert [(each["lm_loss"], each["grad_norm"]) for each in ours] == [
        (each["lm_loss"], each["grad_norm"]) for each in theirs
    ]


@pytest.mark.wide
def test_the_disk_has_what_neighbours_take_with_them(tmp_path: Path) -> None:
    more = words("--num-layers 3 --pp 3 --tp 2 --save-interval 4")
    with nodes(3, tmp_path, [*FLAGS, *more, "--save", tmp_path / "run", *WARM, "--elastic-replan"]) as started:
        first, *others = started
        until(lambda: steps(tmp_path) >= 6, "no step", 120.0)
        for each in others:
            each.lose()
        first.wait_for("; 2 ranks instead of 6, on n0; ", 180.0)
        assert first.said().count("continues from ") == 1
        assert "copies in memory of step" not in first.said()
        before = steps(tmp_path)
        until(lambda: steps(tmp_path) >= before + 3, "no step", 90.0)
        tell_prices(first)
        (tmp_path / "run" / "STOP").touch()
        assert first.launcher.wait(90) == 85, first.said()
    assert_undisturbed(tmp_path, words("--num-layers 3"), RANKS)

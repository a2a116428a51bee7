"""A fault of any kind, in any phase, on any rank: the run ends, names the culprit, and resumes unchanged.

A test is a campaign: one run directory, a new start after each fault, and at the end a comparison with an undisturbed
run.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from tests.end_to_end.campaign import (
    DEATHS,
    ERRORS,
    FAULTY,
    HANGS,
    KINDS,
    LAYOUTS,
    MEETING,
    OF_RANK_0,
    PHASES,
    RANKS,
    REQUESTS,
    START,
    UNWATCHED,
    Campaign,
    everything_said,
)
from tests.end_to_end.runs import GPT2, MOCK
from tests.harness.covering_array import Row, covering_array, every_value_once
from tests.harness.fault import Fault
from tests.harness.fork_server import wait_for_exit
from tests.harness.job import Job

MANNERS = {"death": tuple(DEATHS), "hang": HANGS, "request": REQUESTS, "error": tuple(ERRORS)}
FACTORS = {
    "manner": tuple(MANNERS),
    "phase": PHASES,
    "rank": tuple(range(RANKS)),
    "layout": tuple(LAYOUTS),
    "store_of_rank_0": (False, True),
    "launcher": (False, True),
}
PARTS = 4
"""Parts of the faults of a layout: the first one of TP runs in `make test`, the others in CI."""


def possible(row: Row) -> bool:
    if row["phase"] in OF_RANK_0 and row["rank"]:
        return False
    if row["launcher"] and row["rank"] == 0 and row["phase"] in START:
        return False  # it may end all ranks before one of them can report
    # Before all have connected, a suspended rank counts as one that has not come.
    return not (row["manner"] == "hang" and row["phase"] in (*UNWATCHED, *MEETING))


def steps_before(phase: str) -> int:
    return 0 if phase in (*UNWATCHED, *START) else 2


Planned = tuple[Fault, dict[str, bool]]
"""Fault with the arguments of `Campaign.disturb`."""


def planned() -> dict[tuple[str, int], list[Planned]]:
    """Return faults by layout and part that cover every two values of the factors; the first parts cover every
    value."""
    generator = random.Random(0)
    found: dict[tuple[str, int], list[Planned]] = {}
    rows = covering_array(FACTORS, possible)
    first = every_value_once(rows)
    for number, row in enumerate(rows):
        kind = generator.choice(MANNERS[row["manner"]])
        fault = Fault(row["phase"], row["rank"], steps_before(row["phase"]), kind)
        part = 0 if row in first else 1 + number % (PARTS - 1)
        circumstances = {name: row[name] for name in ("store_of_rank_0", "launcher")}
        found.setdefault((row["layout"], part), []).append((fault, circumstances))
    return found


def loads_last(faults: list[Planned]) -> list[Planned]:
    """Return the faults with those during a load at the end, because a load needs a checkpoint."""
    return sorted(faults, key=lambda planned: planned[0].phase == "loading")


PLANNED = planned()


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.wide) for part in range(1, PARTS))])
@pytest.mark.parametrize("layout", ["tp", pytest.param("pp", marks=pytest.mark.wide)])
def test_a_run_survives_faults_of_every_manner_in_every_phase(layout: str, part: int, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", layout)
    for fault, circumstances in loads_last(PLANNED[layout, part]):
        campaign.disturb(fault, **circumstances)
    campaign.assert_unbroken()


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_survives_every_fault(layout: str, kind: str, phase: str, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", layout)
    manner = next(manner for manner, kinds in MANNERS.items() if kind in kinds)
    ranks = [
        rank for rank in range(RANKS) if possible({"phase": phase, "rank": rank, "manner": manner, "launcher": False})
    ]
    if phase == "loading" and ranks:
        campaign.disturb(Fault("saved", 0, 1, "term"))
    for rank, store_of_rank_0 in product(ranks, (False, True)):
        launcher = store_of_rank_0 and phase not in START
        fault = Fault(phase, rank, steps_before(phase), kind)
        campaign.disturb(fault, store_of_rank_0=store_of_rank_0, launcher=launcher)
    campaign.assert_unbroken()


@dataclass
class Chance:
    """Random disturbance of one start, drawn from a seed."""

    campaign: Campaign
    random: random.Random

    def disturb(self) -> None:
        """Start, disturb, and assert the documented end of the run, with one message at most."""
        happens = self.random.choice(
            [self.fault, self.fault, self.two_faults, self.signal, self.signal, self.pause, self.pause_of_all]
        )
        happens()

    def _fault(self) -> Fault:
        kind = self.random.choice(KINDS)
        manner = next(manner for manner, kinds in MANNERS.items() if kind in kinds)
        while True:
            phase, rank = self.random.choice(PHASES), self.random.randrange(RANKS)
            at_start = phase in (*UNWATCHED, *START)
            if possible({"manner": manner, "phase": phase, "rank": rank, "launcher": False}) and (
                phase != "loading" or self.campaign.latest
            ):
                return Fault(phase, rank, 0 if at_start else self.random.randint(1, 3), kind)

    def fault(self) -> None:
        """Plant one fault inside."""
        self.campaign.disturb(self._fault(), store_of_rank_0=self.random.random() < 0.5)

    def two_faults(self) -> None:
        """Plant two faults inside: either may come first, and the second may not come at all."""
        first, second = self._fault(), self._fault()
        with self.campaign.start(f"{first};{second}", steps=6, least_seconds=2.0, longest_seconds=8.0) as job:
            job.wait_as_launcher()
            self._assert_ended(job, f"{first} and {second}")
        for fault in (first, second):
            fault.record(self.campaign.folder).unlink(missing_ok=True)

    def signal(self) -> None:
        """Send signals from outside, at any moment, to any ranks."""
        number = self.random.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGSTOP])
        ranks = self.random.sample(range(RANKS), self.random.randint(1, RANKS))
        times = self.random.randint(1, 5)
        with self._slow_start(least_seconds=2.0) as job:
            for rank in ranks * times:
                job.kill(rank, number)
            if number == signal.SIGSTOP and len(ranks) == RANKS:
                job.kill_all(signal.SIGKILL)  # no rank is left to notice
            wait_for_exit(job.ranks, 60.0)
            if over := "stopped after" in job.stdout(0):
                job.kill_all(signal.SIGKILL)  # no watchdog watches a rank that is suspended after the end
            codes = job.wait()
            where = f"{number.name} to {ranks}: {codes}"
            self._assert_ended(job, where)
            if number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                assert codes == [85] * RANKS, where
            elif not over and len(ranks) < RANKS:
                said = "".join(map(job.stderr, range(RANKS)))
                assert any(f"rank {rank} (process {job.ranks[rank].process.pid} " in said for rank in ranks), where

    def pause(self) -> None:
        """Suspend one rank, for less than the limits."""
        self._pause([self.random.randrange(RANKS)], seconds=0.5, least_seconds=30.0)

    def pause_of_all(self) -> None:
        """Suspend all ranks, as Ctrl-Z does, for longer than the limit."""
        self._pause(list(range(RANKS)), seconds=5.0, least_seconds=2.0)

    def _pause(self, ranks: list[int], seconds: float, least_seconds: float) -> None:
        with self._slow_start(least_seconds) as job:
            for rank in ranks:
                job.kill(rank, signal.SIGSTOP)
            time.sleep(seconds)
            for rank in ranks:
                job.kill(rank, signal.SIGCONT)
            codes = job.wait()
            said = everything_said(job)
        assert (codes, said) == ([85] * RANKS, []), f"pause of {ranks}"

    @contextmanager
    def _slow_start(self, least_seconds: float) -> Iterator[Job]:
        """Yield a job at a moment in one of its first steps."""
        with self.campaign.start(steps=8, least_seconds=least_seconds, longest_seconds=8.0, step_seconds=0.2) as job:
            job.wait_for_output(0, "  start  ")
            time.sleep(self.random.random())
            yield job

    def _assert_ended(self, job: Job, where: str) -> None:
        said = everything_said(job)
        where = f"{where} in {job.directory}\n" + "\n".join(said)
        assert sum(line.startswith("error") for text in said for line in text.splitlines()) <= 1, where
        assert all("planted" in text for text in said if "Traceback" in text), where


TRIALS = 6
"""Starts per campaign."""


def run_by_chance(seed: int, folder: Path) -> None:
    generator = random.Random(seed)
    layout = generator.choice(tuple(LAYOUTS))
    campaign = Campaign(folder / "campaign", layout)
    for _ in range(TRIALS):
        before = campaign.latest
        Chance(campaign, generator).disturb()
        assert campaign.latest >= before
    campaign.assert_unbroken()


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(1))
def test_a_run_survives_chance(seed: int, tmp_path: Path) -> None:
    run_by_chance(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 10))
def test_a_run_survives_more_of_it(seed: int, tmp_path: Path) -> None:
    run_by_chance(seed, tmp_path)


def test_one_process_alone_that_hangs_is_ended(spawn: Callable[..., Job], tmp_path: Path) -> None:
    flags = [*MOCK, *GPT2, "--train-iters", 9, "--watchdog-min-seconds", 1, "--save", tmp_path / "run"]
    job = spawn([FAULTY, *flags], 1, FAULT="forward/0/3/loop", FAULT_RECORD=str(tmp_path))
    assert job.wait(timeout=60) == [85]
    assert job.stderr(0).startswith("error: step 3 hangs: rank 0 (process ")


def test_a_rank_that_dies_is_named_though_the_launcher_ends_the_others(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "tp")
    campaign.disturb(Fault("forward", 3, 2, "kill"), launcher=True)


@pytest.mark.wide
def test_a_rank_that_dies_while_tokens_travel_to_experts_is_named(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "ep")
    campaign.disturb(Fault("exchange", 1, 2, "kill"))
    campaign.assert_unbroken()


@pytest.mark.wide
def test_a_rank_that_hangs_while_gradients_travel_to_tokens_is_named(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "ep")
    campaign.disturb(Fault("exchange in backward", 3, 2, "stop"))
    campaign.assert_unbroken()


@pytest.mark.wide  # as the exchange of tokens above
def test_a_rank_that_dies_while_keys_and_values_travel_is_named(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "cp")
    campaign.disturb(Fault("round", 1, 2, "kill"))
    campaign.disturb(Fault("round in backward", 3, 2, "stop"))
    campaign.assert_unbroken()


@pytest.mark.wide
@pytest.mark.parametrize("phase", ["group", "meeting"])
def test_rank_0_is_named_and_killed_where_it_is_suspended_before_the_first_step(phase: str, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "tp")
    campaign.disturb(Fault(phase, 0, 0, "stop"))


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["kill", pytest.param("stop", marks=pytest.mark.wide)])
def test_rank_0_is_named_where_the_store_goes_with_it(kind: str, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "tp")
    campaign.disturb(Fault("forward", 0, 2, kind), store_of_rank_0=True)

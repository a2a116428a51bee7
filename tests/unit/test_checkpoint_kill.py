"""Kill -9 and loss of power at any moment of a save: the last good checkpoint is loaded, or the new one, whole."""

from __future__ import annotations

import itertools
import os
import random
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest

from megalite import checkpoint
from megalite.errors import CheckpointError
from tests.harness.file_faults import Fault, FileFaults, Operation, cut_power, kill, kill_midway
from tests.harness.forks import exit_code, fork, in_clean_process
from tests.harness.saved_run import KINDS, Saved, SavedRun, litter
from tests.harness.wide import wide_except

pytestmark = pytest.mark.costly


def save_until(run: SavedRun, directory: Path, saved: Saved, kind: str, at: int, fault: Fault) -> None:
    with FileFaults(directory, at, fault):
        run.save(directory, *saved, kind)


def operations_of(run: SavedRun, before: Path, saved: Saved, kind: str) -> list[Operation]:
    """Return the operations of a save into a copy of a run directory."""
    directory = Path(shutil.copytree(before, before.with_name("whole")))
    with FileFaults(directory) as faults:
        run.save(directory, *saved, kind)
    for path in directory.rglob("*"):
        if path.is_file() and not (before / path.relative_to(directory)).exists():
            assert faults.written(path) == path.stat().st_size, f"{path} is written past the faults"
    shutil.rmtree(directory)
    return faults.operations


Writes = Literal["all", "ends", "none"]
"""The writes at which saves are killed: of several to one file in a row, `ends` are the first and the last."""


def is_left_out(operations: list[Operation], at: int, fault: Fault, writes: Writes) -> bool:
    operation = operations[at]
    if not operation.size:
        return fault is kill_midway
    row = operations[at - 1 : at + 2]
    between = 0 < at < len(operations) - 1 and all(each.size and each.path == operation.path for each in row)
    return (fault is kill_midway and operation.size < 2) or writes == "none" or (writes == "ends" and between)


def killed_saves(
    run: SavedRun, before: Path, saved: Saved, kind: str, fault: Fault, writes: Writes
) -> Iterator[tuple[Path, str]]:
    """Yield a copy of the run directory `before`, and the moment, for each moment at which a save into it can be
    killed."""
    operations = operations_of(run, before, saved, kind)
    for at in itertools.count():
        operation = operations[at] if at < len(operations) else None
        if operation is not None and is_left_out(operations, at, fault, writes):
            continue
        directory = Path(shutil.copytree(before, before.with_name("killed")))
        code = exit_code(fork(save_until, run, directory, saved, kind, at, fault))
        if code == 0:
            shutil.rmtree(directory)
            assert at == len(operations)
            return
        moment = f"{fault.__name__} at operation {at}, {operation}"
        assert code == -signal.SIGKILL, moment
        yield directory, moment
        shutil.rmtree(directory)


def kill_everywhere(
    folder: Path, before: Saved | None, saved: Saved, kind: str, fault: Fault, writes: Writes
) -> set[Saved | None]:
    """Return the checkpoints found after the kills."""
    run = SavedRun()
    (folder / "before").mkdir()
    if before is not None:
        run.save(folder / "before", *before)
    seen = set()
    for directory, moment in killed_saves(run, folder / "before", saved, kind, fault, writes):
        found, passed_over = run.newest(directory)
        assert found in (before, saved), moment
        assert not passed_over, moment
        seen.add(found)
        run.save(directory, 3, 3, kind)
        assert run.newest(directory) == ((3, 3), ()), moment
        assert not litter(directory), moment
        for path in directory.glob("iter_*"):
            run.load(path)
    return seen


FAULTS = (kill, kill_midway, cut_power)
STARTS = {"the first": (None, (1, 2)), "the next": ((1, 1), (2, 2)), "the same iteration again": ((1, 1), (1, 2))}
CASES = [
    (STARTS["the next"], kill, "synchronous"),
    (STARTS["the same iteration again"], kill_midway, "synchronous"),
    (STARTS["the same iteration again"], cut_power, "asynchronous"),
    (STARTS["the same iteration again"], cut_power, "torch_dist"),
]
WIDE = [
    *((STARTS["the first"], fault, "synchronous") for fault in FAULTS),
    *((STARTS["the same iteration again"], fault, "synchronous") for fault in (kill, cut_power)),
    *((STARTS["the next"], fault, "synchronous") for fault in (kill_midway, cut_power)),
    (STARTS["the next"], kill, "asynchronous"),
]


def check(folder: Path, start: tuple[Saved | None, Saved], fault: Fault, kind: str, writes: Writes) -> None:
    before, saved = start
    seen = in_clean_process(kill_everywhere, folder, before, saved, kind, fault, writes)
    assert seen == {before, saved} if fault is not kill_midway else before in seen


@pytest.mark.wide_except("start0-kill_midway-synchronous")
@pytest.mark.parametrize(
    ("start", "fault", "kind"),
    [*CASES[1:3], *(pytest.param(*case, marks=pytest.mark.wide) for case in (CASES[0], CASES[3], *WIDE))],
)
def test_whatever_the_moment_a_whole_checkpoint_is_found(
    tmp_path: Path, start: tuple[Saved | None, Saved], fault: Fault, kind: str
) -> None:
    check(tmp_path, start, fault, kind, "ends" if (start, fault, kind) in CASES else "all")


@pytest.mark.wide
@pytest.mark.parametrize(("start", "fault", "kind"), CASES)
def test_whatever_the_write_a_whole_checkpoint_is_found(
    tmp_path: Path, start: tuple[Saved | None, Saved], fault: Fault, kind: str
) -> None:
    check(tmp_path, start, fault, kind, "all")


def kill_twice(folder: Path) -> int:
    """Kill a save, and the next save while it cleans up; return the number of pairs."""
    run = SavedRun()
    run.save(folder / "first" / "before", 1, 1)
    left: dict[tuple[str, ...], Path] = {}
    for directory, _ in killed_saves(run, folder / "first" / "before", (1, 2), "synchronous", kill, "none"):
        names = tuple(sorted(path.name for path in directory.iterdir()))
        if names not in left:
            left[names] = Path(shutil.copytree(directory, folder / str(len(left)) / "before"))
    pairs = 0
    for before in left.values():
        first = run.newest(before)
        for directory, moment in killed_saves(run, before, (1, 3), "synchronous", kill, "none"):
            assert run.newest(directory) in (first, ((1, 3), ())), moment
            pairs += 1
    assert len(left) > 3
    return pairs


@pytest.mark.wide
def test_two_kills_one_after_the_other_lose_nothing_either(tmp_path: Path) -> None:
    assert in_clean_process(kill_twice, tmp_path) > 40


# ------------------------------------------------------------------------------------------------------ at random


def save_again_and_again(run: SavedRun, directory: Path, number: int, kind: str, told: int) -> None:
    """Save each iteration twice, so that every second save replaces one."""
    while True:
        os.write(told, b"begin %d\n" % number)
        run.save(directory, number // 2, number, kind)
        os.write(told, b"end %d\n" % number)
        checkpoint.remove_old(directory, interval=1000)
        time.sleep(0.002)
        number += 1


def kill_at_random(folder: Path, kind: str, wanted: int) -> tuple[int, int]:
    """Kill saves at random moments until `wanted` kills were inside a save; return their number and that of all
    kills."""
    generator = random.Random(0)
    run = SavedRun()
    number = 2
    run.save(folder, 1, number)
    inside = 0
    for kills in range(1, 20 * wanted):
        reading, telling = os.pipe()
        process = fork(save_again_and_again, run, folder, number + 1, kind, telling)
        os.close(telling)
        select.select([reading], [], [])
        time.sleep(0.05 * generator.random())
        os.kill(process, signal.SIGKILL)
        assert exit_code(process) == -signal.SIGKILL
        with open(reading) as told:
            events = [line.split() for line in told.read().splitlines()]
        last = int(events[-1][1])
        saving = events[-1][0] == "begin"
        inside += saving
        found, passed_over = run.newest(folder)
        moment = f"kill {kills}, {'inside' if saving else 'after'} the save of number {last}"
        possible = [last - 1, last] if saving else [last]
        assert found in [(each // 2, each) for each in possible], moment
        assert not passed_over, moment
        number = found[1]
        if inside == wanted:
            run.save(folder, number // 2 + 1, 2 * (number // 2 + 1), kind)
            assert not litter(folder)
            return inside, kills
    return inside, kills


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_kills_at_random_moments(tmp_path: Path, kind: str) -> None:
    inside, kills = in_clean_process(kill_at_random, tmp_path, kind, 40)
    print(f"{inside} of {kills} kills were inside a save")
    assert inside >= 30


# ------------------------------------------------------------------------------------------------------ two jobs


def save_beside_another(run: SavedRun, directory: Path, job: int, kind: str) -> None:
    for iteration in range(2, 30):
        with suppress(CheckpointError):
            run.save(directory, iteration, 1000 * job + iteration, kind)


def load_beside_two_jobs(directory: Path, kind: str) -> int:
    """Return the number of successful loads, each of one save's values, while two jobs save the same iterations."""
    run = SavedRun()
    run.save(directory, 1, 1, kind)
    jobs = [fork(save_beside_another, run, directory, job, kind) for job in (1, 2)]
    loads = 0
    while not all(os.waitid(os.P_PID, job, os.WEXITED | os.WNOHANG | os.WNOWAIT) for job in jobs):
        with suppress(CheckpointError):
            run.newest(directory)
            loads += 1
    assert [exit_code(job) for job in jobs] == [0, 0]
    run.newest(directory)
    run.save(directory, 30, 30, kind)
    assert run.newest(directory) == ((30, 30), ())
    assert not litter(directory)
    return loads


@pytest.mark.wide
@pytest.mark.parametrize("kind", wide_except(KINDS, ["synchronous"]))
def test_two_jobs_where_no_lock_keeps_them_apart_cause_no_wrong_load(tmp_path: Path, kind: str) -> None:
    assert in_clean_process(load_beside_two_jobs, tmp_path, kind) > 0

"""Ranks that do not connect: the missing ones are reported, and the run ends."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.end_to_end.campaign import FAULTY, everything_said
from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN
from tests.harness.fault import Fault
from tests.harness.fork_server import wait_for_exit
from tests.harness.job import Job

ENTRY = f"""
import os, resource, runpy, signal, sys
from megalite.errors import DataError
from megalite.lifecycle import failure, rendezvous
from megalite.training import data

rendezvous.PATIENCE, rendezvous.STORE_HANGS = 0.2, 2.0
connect, wait_for_all_ranks = rendezvous.connect, rendezvous.wait_for_all_ranks
# Where all come, they have time: a busy machine starts them seconds apart.
limit, failure._LAUNCHER_SECONDS = (2.0, 1.0) if os.environ["ABSENT"] else (30.0, 30.0)
if "MORE_FILES" in os.environ:
    failure._LAUNCHER_SECONDS = 2.0  # waited out: nobody ends the ranks, and all speak

def come(store, place, seconds, watch):
    if os.environ["RANK"] in os.environ["ABSENT"].split():
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for_all_ranks(store, place, limit, watch)

if "MORE_FILES" in os.environ:
    most = len(os.listdir("/proc/self/fd")) + int(os.environ["MORE_FILES"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
if os.environ["RANK"] in os.environ.get("BROKEN", "").split():
    def broken(*arguments):
        raise DataError("no such disk on this machine")
    data.open_data = broken

rendezvous.wait_for_all_ranks = come
# The connections for a failure, which have limits of their own, keep them.
rendezvous.connect = lambda place, seconds, purpose: connect(
    place, limit if seconds > rendezvous.WORD_SECONDS else seconds, purpose
)
sys.argv[0] = {str(PRETRAIN)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""

Start = Callable[[str, int], Job]


def before_coming(code: str) -> str:
    """Return the entry script, with code that runs before the rendezvous."""
    return ENTRY.replace("rendezvous.wait_for_all_ranks = come", code + "rendezvous.wait_for_all_ranks = come")


@pytest.fixture
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Start a run in which absent ranks stop before they connect; the others then wait for 2 s."""
    entry = tmp_path / "entry.py"
    entry.write_text(ENTRY)
    with ExitStack() as stack:

        def start(absent: str, world_size: int) -> Job:
            job = Job(
                [entry, *MOCK, *GPT2, "--train-iters", "3", "--global-batch-size", "8"],
                world_size,
                tmp_path,
                {"ABSENT": absent},
                store_of_rank_0=request.param,
            )
            return stack.enter_context(job)

        yield start


def said_by(job: Job, rank: int) -> list[str]:
    """Return the lines of a rank, without those on what it waits for."""
    return [line for line in job.stderr(rank).splitlines() if not line.startswith("waiting for ")]


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(False, id="store of the launcher", marks=pytest.mark.wide),
        pytest.param(True, id="store of rank 0"),
    ],
    indirect=True,
)
def test_the_ranks_that_do_not_come_are_named(start: Start) -> None:
    job = start("1 2", 4)
    assert wait_for_exit([job.ranks[0]], 60) == []
    assert job.ranks[0].exit_code == 85, job.stderr(0)
    # On a busy machine a look may come late.
    told = [line for line in job.stderr(0).splitlines() if line.startswith("waiting for ")]
    assert all(re.fullmatch(r"waiting for ranks? [123, ]+ of 4, for \d+ s so far", line) for line in told)
    assert told[-1].startswith("waiting for ranks 1, 2 of 4, ")
    assert wait_for_exit([job.ranks[3]], 60) == []
    assert (job.ranks[3].exit_code, job.stderr(3)) == (85, "")
    assert "error: ranks 1, 2 of 4 did not connect within 2 s to the store at " in job.stderr(0)


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(False, id="store of the launcher", marks=pytest.mark.wide),
        pytest.param(True, id="store of rank 0", marks=pytest.mark.wide),
    ],
    indirect=True,
)
def test_where_rank_0_does_not_come_another_rank_says_so(start: Start) -> None:
    job = start("0", 2)
    assert wait_for_exit([job.ranks[1]], 60) == []
    assert job.ranks[1].exit_code == 85
    expected = "error on rank 1: (rank 0 has not connected, or hangs, for .* s, at )?the store at .*"
    *before, last = job.stderr(1).splitlines()
    assert re.match(expected, last)
    assert all(re.match(r"waiting for the store at \S+ \(.*\) to open, for \d+ s so far", line) for line in before)


@pytest.mark.wide
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc")
def test_ranks_that_may_open_too_few_files_all_say_so_and_none_waits_for_another(tmp_path: Path) -> None:
    entry = tmp_path / "entry.py"
    entry.write_text(ENTRY)
    environment = {"ABSENT": "", "MORE_FILES": "10"}
    with Job([entry, *MOCK, *GPT2, "--train-iters", "3"], 2, tmp_path, environment, store_of_rank_0=True) as job:
        assert job.wait(timeout=60) == [64, 64]
        for rank, where in enumerate(("error: ", "error on rank 1: ")):
            assert re.match(where + r"there are too many open files \(the limit is \d+ per process\)", job.stderr(rank))


@pytest.mark.parametrize(
    ("broken", "store_of_rank_0"),
    [
        pytest.param(
            broken,
            store_of_rank_0,
            id=f"{broken}-store of {'rank 0' if store_of_rank_0 else 'the launcher'}",
            marks=() if (broken, store_of_rank_0) == ("0", True) else pytest.mark.wide,
        )
        for broken in ("0", "1 2", "0 1 2")
        for store_of_rank_0 in (False, True)
    ],
)
def test_ranks_that_fail_before_they_come_leave_none_waiting_on_other_machines(
    broken: str, store_of_rank_0: bool, tmp_path: Path
) -> None:
    entry = tmp_path / "entry.py"
    entry.write_text(ENTRY)
    flags = [*MOCK, *GPT2, "--train-iters", "3", "--global-batch-size", "6"]
    environment = {"ABSENT": "", "BROKEN": broken, "LOCAL_WORLD_SIZE": "1"}
    with Job([entry, *flags], 3, tmp_path, environment, store_of_rank_0=store_of_rank_0) as job:
        assert job.wait(timeout=60) == [64] * 3
        said = [line for rank in range(3) for line in said_by(job, rank)]
        assert len(said) == 1, said
        assert re.match(r"error( on rank [12])?: no such disk on this machine$", said[0])


@pytest.mark.wide
def test_who_comes_when_another_has_failed_and_rank_0_knows_it_ends_like_them(tmp_path: Path) -> None:
    """Rank 0, which has the store, stays for late ranks."""
    entry = tmp_path / "entry.py"
    late = f"if os.environ['RANK'] == '2':\n    while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    heard = f"""
wait_for_all = rendezvous._wait_as_host
def hear(*arguments):
    word = wait_for_all(*arguments)
    open({str(tmp_path / "heard")!r}, "w").close()
    return word
rendezvous._wait_as_host = hear
"""
    entry.write_text("import os, time\n" + late + before_coming(heard))
    environment = {"ABSENT": "", "BROKEN": "1", "LOCAL_WORLD_SIZE": "1"}
    flags = [*MOCK, *GPT2, "--train-iters", "3", "--global-batch-size", "6"]
    with Job([entry, *flags], 3, tmp_path, environment, store_of_rank_0=True) as job:
        deadline = time.monotonic() + 30.0
        while not (tmp_path / "heard").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)  # it would have ended by now
        (tmp_path / "go").touch()
        assert job.wait(timeout=30) == [64] * 3
        assert said_by(job, 2) == []


@pytest.mark.wide
def test_a_rank_that_fails_while_rank_0_reads_its_data_says_so_at_once(tmp_path: Path) -> None:
    entry = tmp_path / "entry.py"
    reading = f"""
if os.environ["RANK"] == "0":
    import time
    opened = data.open_data
    def read(*arguments):
        while not os.path.exists({str(tmp_path / "go")!r}):
            time.sleep(0.01)
        return opened(*arguments)
    data.open_data = read
"""
    entry.write_text(before_coming(reading))
    environment = {"ABSENT": "", "BROKEN": "1", "LOCAL_WORLD_SIZE": "1"}
    with Job([entry, *MOCK, *GPT2, "--train-iters", "3"], 2, tmp_path, environment, store_of_rank_0=True) as job:
        assert wait_for_exit([job.ranks[1]], 30) == []
        assert job.ranks[1].exit_code == 64
        assert said_by(job, 1) == ["error on rank 1: no such disk on this machine"]
        (tmp_path / "go").touch()
        assert job.wait(timeout=30) == [64, 64]
        assert said_by(job, 0) == []


@pytest.mark.wide
def test_ranks_that_differ_in_the_watchdog_are_told_so(tmp_path: Path) -> None:
    entry = tmp_path / "entry.py"
    flags = [*MOCK, *GPT2, "--train-iters", "3", "--global-batch-size", "4"]
    entry.write_text("import os, sys\nsys.argv += ['--no-watchdog'] * (os.environ['RANK'] == '0')\n" + ENTRY)
    with Job([entry, *flags], 2, tmp_path, {"ABSENT": ""}) as job:
        assert job.wait(timeout=30) == [64, 64]
        assert "rank 1 was started with other flags than rank 0: 'watchdog: true' there" in job.stderr(0)


@pytest.mark.parametrize(
    ("phase", "rank", "store_of_rank_0"),
    [
        ("meeting", 2, True),
        *(
            pytest.param(*case, marks=pytest.mark.wide)
            for case in (("group", 0, True), ("meeting", 0, False), ("group", 2, False))
        ),
    ],
)
def test_a_rank_that_is_killed_before_the_run_is_together_is_named_and_ends_the_others(
    phase: str, rank: int, store_of_rank_0: bool, tmp_path: Path
) -> None:
    fault = Fault(phase, rank, 0, "kill")
    environment = {"FAULT": str(fault), "FAULT_RECORD": str(tmp_path)}
    flags = [*MOCK, *GPT2, "--train-iters", "3", "--global-batch-size", "8"]
    with Job([FAULTY, *flags], 4, tmp_path, environment, store_of_rank_0=store_of_rank_0) as job:
        codes = job.wait(timeout=40)
        assert codes == [-9 if number == rank else 85 for number in range(4)]
        (said,) = everything_said(job)
        process = job.ranks[rank].process.pid
        assert re.match(rf"error: rank {rank} \(process {process} on .*\) has ended without a message, last", said)
        assert re.search(r' seen in step 0, "meeting", [\d.]+ s before', said)


@pytest.mark.wide
def test_who_comes_when_rank_0_is_dead_says_so(tmp_path: Path) -> None:
    fault = Fault("came", 0, 0, "kill")
    environment = {"FAULT": str(fault), "FAULT_RECORD": str(tmp_path), "LAUNCHER_SECONDS": "0.5"}
    with Job([FAULTY, *MOCK, *GPT2, "--train-iters", "3"], 2, tmp_path, environment) as job:
        assert job.wait(timeout=40) == [-9, 85]
        (said,) = everything_said(job)
        assert re.match(
            "error on rank 1: rank 0 connected to the store at .*, but then ended without a message, or", said
        )


@pytest.mark.wide
def test_where_rank_0_is_killed_and_its_store_goes_with_it_that_is_said(tmp_path: Path) -> None:
    fault = Fault("connected", 0, 0, "kill")
    environment = {"FAULT": str(fault), "FAULT_RECORD": str(tmp_path), "LAUNCHER_SECONDS": "0.5"}
    with Job([FAULTY, *MOCK, *GPT2, "--train-iters", "3"], 2, tmp_path, environment, store_of_rank_0=True) as job:
        assert job.wait(timeout=40) == [-9, 85]
        (said,) = everything_said(job)
        assert re.match("error on rank 1: .* any more: rank 0, which runs it, ended without a message, or cannot", said)

"""Ranks that do not come together: who is missing is told, and the run ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN
from tests.harness.fork_server import wait_for_exit
from tests.harness.job import Job

ENTRY = f"""
import os, runpy, signal, sys
from megalite.training import failure, launch, meeting

meeting.PATIENCE, meeting.STORE_HANGS, failure._LAUNCHER_SECONDS = 0.2, 2.0, 1.0
meet = launch.meet

def come(store, place, seconds):
    if os.environ["RANK"] in os.environ["ABSENT"].split():
        os.kill(os.getpid(), signal.SIGSTOP)
    meet(store, place, 3.0)

launch.meet = come
launch.connect = lambda place, seconds, purpose: meeting.connect(place, 3.0, purpose)
sys.argv[0] = {str(PRETRAIN)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""

Start = Callable[[str, int], Job]


@pytest.fixture(params=[False, True], ids=["store of the launcher", "store of rank 0"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """A run on so many ranks, of which the absent ones stand still before they meet; the others may wait for 3 s."""
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


def test_the_ranks_that_do_not_come_are_named(start: Start) -> None:
    job = start("1 2", 4)
    assert wait_for_exit([job.ranks[0]], 60) == []
    assert job.ranks[0].exit_code == 85, job.stderr(0)
    *_, before, last = (line for line in job.stderr(0).splitlines() if line.startswith("waiting for "))
    assert last == "waiting for ranks 1, 2 of 4, for 2 s by now"
    assert before.endswith(" of 4, for 1 s by now")
    assert wait_for_exit([job.ranks[3]], 60) == []
    assert (job.ranks[3].exit_code, job.stderr(3)) == (85, "")
    assert "error: ranks 1, 2 of 4 did not come within 3 s to the store at " in job.stderr(0)


def test_where_rank_0_does_not_come_another_rank_says_so(start: Start) -> None:
    job = start("0", 2)
    assert wait_for_exit([job.ranks[1]], 60) == []
    assert job.ranks[1].exit_code == 85
    expected = "error on rank 1: (rank 0 has not come, or stands still, for .* s, at )?the store at .*"
    assert re.match(expected, job.stderr(1))
    assert job.stderr(1).count("\n") == 1

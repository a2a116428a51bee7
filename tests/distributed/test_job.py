"""Entry scripts run on forked ranks, and killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.fork_server import RankFailure, RankTimeout, running
from tests.harness.job import Job

Spawn = Callable[..., Job]

SUM = """
import os, sys
import torch, torch.distributed as dist
assert __name__ == "__main__"
dist.init_process_group("gloo")
total = torch.tensor(float(os.environ["RANK"]) + 1)
dist.all_reduce(total)
print("total", total.item(), sys.argv[1:], os.environ.get("COLOUR"))
print("problem", file=sys.stderr)
dist.destroy_process_group()
sys.exit(85)
"""

LOOP = """
import os, subprocess, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print("child", child.pid)
for step in range(10**9):
    dist.all_reduce(torch.ones(1))
    print("step", step)
    time.sleep(0.01)
"""


def script(directory: Path, text: str) -> Path:
    path = directory / "entry.py"
    path.write_text(text)
    return path


def test_job_runs_as_torchrun_would(spawn: Spawn, tmp_path: Path) -> None:
    job = spawn([script(tmp_path, SUM), "--flag", "x"], world_size=2, COLOUR="green")
    assert job.wait() == [85, 85]
    for rank in range(2):
        assert job.stdout(rank) == "total 3.0 ['--flag', 'x'] green\n"
        assert job.stderr(rank).endswith("problem\n")


def test_exceptions_and_messages_end_as_the_interpreter_ends(spawn: Spawn, tmp_path: Path) -> None:
    job = spawn([script(tmp_path, "import atexit\natexit.register(print, 'bye')\nraise ValueError('planted')")], 1)
    assert job.wait() == [1]
    assert "ValueError: planted" in job.stderr(0)
    assert job.stdout(0) == "bye\n"
    job = spawn([script(tmp_path, "import sys\nsys.exit('a message')")], 1)
    assert job.wait() == [1]
    assert job.stderr(0) == "a message\n"


def test_killed_rank_and_restart(spawn: Spawn, tmp_path: Path) -> None:
    for _ in range(2):
        job = spawn([script(tmp_path, LOOP)], world_size=2)
        job.wait_for_output(0, "step 3\n")
        job.kill(1)
        survivor, killed = job.wait(timeout=30)
        assert killed == -signal.SIGKILL
        assert survivor == 1  # its all-reduce lost the peer


def test_signal_to_every_rank(spawn: Spawn, tmp_path: Path) -> None:
    job = spawn([script(tmp_path, LOOP)], world_size=2)
    job.wait_for_output(0, "step 0\n")
    job.kill_all(signal.SIGTERM)
    assert job.wait() == [-signal.SIGTERM] * 2


def test_close_ends_ranks_and_their_children(spawn: Spawn, tmp_path: Path) -> None:
    with spawn([script(tmp_path, LOOP)], world_size=1) as job:
        job.wait_for_output(0, "step 0\n")
        child = int(job.stdout(0).split()[1])
        os.kill(child, 0)
    assert job.wait() == [-signal.SIGKILL]
    deadline = time.monotonic() + 10  # on a busy machine, a killed process takes a while to disappear
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(child)


def test_timeout_tells_where_ranks_stand(spawn: Spawn, tmp_path: Path) -> None:
    job = spawn([script(tmp_path, "import sys, time\nprint('ready')\nsys.stderr.write('hm')\ntime.sleep(1000)")], 1)
    job.wait_for_output(0, "ready")
    with pytest.raises(RankTimeout, match="rank 0 of 1 still ran after") as caught:
        job.wait(timeout=0.1)
    assert "entry.py" in caught.value.failures[0]
    assert "hm" in str(caught.value)


def test_rank_that_ends_without_the_awaited_output(spawn: Spawn, tmp_path: Path) -> None:
    job = spawn([script(tmp_path, "raise ValueError('planted')")], 1)
    with pytest.raises(RankFailure, match="ended without printing 'never'") as caught:
        job.wait_for_output(0, "never")
    assert "planted" in str(caught.value)

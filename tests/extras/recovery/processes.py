"""Processes of a run that restarts warm, as /proc shows them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.harness.fork_server import running
from tests.harness.job import Job

Tree = dict[int, list[int]]
"""Agents, each with the processes that it has forked: the one that calls the store first, then the ranks."""


def agents(job: Job) -> Tree:
    """Return the agents of a job."""
    return agents_at(job.port)


def agents_at(port: int) -> Tree:
    """Return the agents that have this port of the store in their environment."""
    found: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = f"MASTER_PORT={port}\0".encode() in (folder / "environ").read_bytes()
            if ours and b"recovery.agent" in (folder / "cmdline").read_bytes():
                found[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    mine = [process for process, parent in found.items() if parent not in found]
    return {agent: children_of(agent) for agent in mine}


def children_of(process: int) -> list[int]:
    """Return the children of a process, in the order in which they were forked."""
    return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


def ranks(job: Job) -> list[int]:
    """Return the processes of the ranks, in the order in which they were forked: that of their numbers."""
    (children,) = agents(job).values()
    return children[1:]


def until(holds: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Wait until something holds. Fails after some seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def no_orphans(before: Tree, seconds: float = 10.0) -> None:
    """Wait until none of the processes is left."""
    all_of_them = [*before, *(child for children in before.values() for child in children)]
    until(lambda: not any(map(running, all_of_them)), f"orphans of {before}", seconds)


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)

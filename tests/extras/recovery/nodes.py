"""Nodes of a run on this machine: launchers that know nothing of each other, each with ranks, as srun has on a node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.end_to_end.runs import PRETRAIN
from tests.extras.recovery.processes import Tree, agents_at, until
from tests.harness.fork_server import loopback_interface
from tests.harness.job import free_port
from tests.slurm.machine import with_variables

RANKS = 2
"""Ranks of a node."""
_LAUNCHER = """
import os, subprocess, sys
node, ranks = map(int, sys.argv[1:3])
own = [{"RANK": str(node * ranks + rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
started = [subprocess.Popen([sys.executable, *sys.argv[3:]], env=os.environ | each) for each in own]
sys.exit(max(process.wait() for process in started))
"""


class Node:
    """A node: its launcher, and all processes that have its name in their environment."""

    def __init__(self, number: int, nodes: int, port: int, folder: Path, flags: Sequence[str]) -> None:
        self.name, self.port, self._output = f"n{number}", port, folder / f"n{number}"
        environment = os.environ | {
            "SLURMD_NODENAME": self.name,
            "WORLD_SIZE": str(nodes * RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": loopback_interface() or "",
        }
        with self._output.open("wb") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, "-c", _LAUNCHER, str(number), str(RANKS), str(PRETRAIN), *flags],
                stdout=output,
                stderr=output,
                env=environment,
            )

    def said(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = 90.0) -> None:
        until(lambda: text in self.said() or self.launcher.poll() is not None, f"no {text!r}:\n{self.said()}", seconds)
        assert text in self.said(), self.said()

    @property
    def tree(self) -> Tree:
        """Return the agent of this node with what it has forked: two that call the store, and the ranks."""
        trees, here = agents_at(self.port), {*self._processes()}
        return {agent: children for agent, children in trees.items() if agent in here}

    def lose(self, number: int = signal.SIGKILL) -> None:
        """Kill every process of the node, as a loss of power does: none of them can say a word."""
        for each in (signal.SIGSTOP, number):
            for process in self._processes():
                with suppress(ProcessLookupError):
                    os.kill(process, each)

    def _processes(self) -> list[int]:
        return list(with_variables(f"SLURMD_NODENAME={self.name}", f"MASTER_PORT={self.port}"))


@contextmanager
def nodes(count: int, folder: Path, flags: Sequence[object], late: int = 0) -> Iterator[list[Node]]:
    """Yield the nodes of a run, and kill what is left of them. `late`: nodes that the test is to add to the list."""
    port = free_port()
    started = [Node(number, count, port, folder, list(map(str, flags))) for number in range(count - late)]
    try:
        yield started
    finally:
        for node in started:
            node.lose()
            node.launcher.wait()

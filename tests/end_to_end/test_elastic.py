"""torchrun may change the number of ranks while a run goes on: it continues from its checkpoint, by the same losses."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, ROOT, ended, iterations, latest_iteration, losses, words
from tests.harness.close import assert_number_close
from tests.harness.job import Job, free_port

pytestmark = pytest.mark.wide

STEPS = 40
FLAGS = (*MOCK, *GPT2, "--train-iters", STEPS, "--save-interval", 1, *words("--fp64 --resume auto"))
TORCHRUN = (
    Path(sys.executable).parent / "torchrun",
    *words("--nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-id=run --local-addr=127.0.0.1"),
    "--rdzv-conf=last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3",
)


class Agents:
    """Agents of torchrun on this machine, each with one rank; a context manager that ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.hold = folder, folder / "run", folder / "hold"
        self.hold.touch()
        self._port = free_port()
        self._agents: list[subprocess.Popen[bytes]] = []
        self._files = ExitStack()

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._agents:
            self.kill(agent)
        self._files.close()

    def start(self) -> subprocess.Popen[bytes]:
        """Start one more agent."""
        output = self._files.enter_context((self.folder / f"agent{len(self._agents)}.log").open("wb"))
        command = [
            *TORCHRUN,
            f"--rdzv-endpoint=127.0.0.1:{self._port}",
            ROOT / "tests" / "slurm" / "paced.py",
            *FLAGS,
            "--save",
            self.run,
        ]
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "HOLD": str(self.hold), "OMP_NUM_THREADS": "1"}
        environment = os.environ | variables | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "GLOO_SOCKET_IFNAME": "lo"}
        agent = subprocess.Popen([str(each) for each in command], env=environment, stdout=output, stderr=output)
        self._agents.append(agent)
        return agent

    @staticmethod
    def kill(agent: subprocess.Popen[bytes]) -> None:
        """Kill an agent and its rank, as the loss of their node does."""
        with suppress(FileNotFoundError, ProcessLookupError):
            ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
            for process in (agent.pid, *map(int, ranks)):
                os.kill(process, signal.SIGKILL)
        agent.wait()

    def starts(self) -> list[int]:
        """Return the numbers of ranks with which the run was started, in this order."""
        return [int(number) for number in re.findall(r"starting: .*, on TP 1 x DP (\d+)", self.log())]

    def log(self) -> str:
        """Return the output of all agents."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("agent*.log")))

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Return when the condition holds. Fails if it does not in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def has_store(self) -> bool:
        """Tell whether an agent has opened the store at which they meet."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
            return True
        return False

    def step(self) -> int:
        """Return the step of the newest checkpoint."""
        return latest_iteration(self.run) if (self.run / "latest_checkpointed_iteration.txt").exists() else 0


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with Agents(tmp_path) as found:
        yield found


def test_a_run_shrinks_when_a_node_is_lost_and_grows_when_one_joins(agents: Agents, tmp_path: Path) -> None:
    first = agents.start()
    agents.until(agents.has_store)  # of the first: the agent with the store must live
    second = agents.start()
    agents.until(lambda: agents.step() >= 2)
    agents.kill(second)
    lost_at = agents.step()
    agents.until(lambda: agents.step() >= lost_at + 3)  # a step that was complete may yet be saved
    third = agents.start()
    agents.until(lambda: agents.starts() == [2, 1, 2])
    agents.hold.unlink()
    agents.until(lambda: None not in (first.poll(), third.poll()))
    assert (first.returncode, third.returncode) == (0, 0), agents.log()
    assert iterations(agents.run) == list(range(1, STEPS + 1))
    with Job([PRETRAIN, *FLAGS, "--save", tmp_path / "whole"], 1, tmp_path / "job") as job:
        ended(job)
    for actual, expected in zip(losses(agents.run), losses(tmp_path / "whole"), strict=True):
        assert_number_close(actual, expected)

"""Run of an entry script on several ranks, as under torchrun but forked: for tests that kill and restart."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import signal
import socket
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore

from tests.harness.fork_server import Rank, RankFailure, RankTimeout, loopback_interface, wait_for_exit

_GRACE_SECONDS = 15.0  # 30 in torchrun
_GLOO = {"GLOO_SOCKET_IFNAME": interface} if (interface := loopback_interface()) else {}


class Job:
    """Run of `argv` (script and arguments) as `__main__` in `world_size` processes, as a context manager.

    Each process gets the environment that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, ...)
    and `environment`. This process hosts the rendezvous store, as torchrun's agent does, so that no other process can
    take its port. Variables that torch reads when it is imported (OMP_NUM_THREADS, which is 1) have no effect. Each
    process leads a process group, so that its children end with it when the job is closed.

    Args:
        directory: folder for `rank0.stdout`, `rank0.stderr`, ...
        store_of_rank_0: rank 0's process hosts the rendezvous store, as under srun, or under torchrun with
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
        told: the variables of another launcher for each rank, in place of torchrun's; rank 0 hosts the store then.
        cwd: working directory, in place of this process's.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        world_size: int,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        *,
        store_of_rank_0: bool = False,
        told: Sequence[Mapping[str, str]] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.world_size = world_size
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._store = (
            None if store_of_rank_0 or told else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        )
        self.port = free_port() if self._store is None else self._store.port
        if told is None:
            shared = _shared_environment(world_size, self.port, agent_store=not store_of_rank_0)
            here = int((environment or {}).get("LOCAL_WORLD_SIZE", world_size))
            told = [shared | {"RANK": str(number), "LOCAL_RANK": str(number % here)} for number in range(world_size)]
        arguments = [str(argument) for argument in argv]
        self.ranks = [
            Rank(
                number,
                directory / f"rank{number}.stacks",
                _enter,
                (arguments, _GLOO | told[number] | dict(environment or {}), directory / f"rank{number}", cwd),
                daemon=False,
            )
            for number in range(world_size)
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stdout(self, rank: int) -> str:
        """Return the standard output of the rank so far."""
        return _read(self.directory / f"rank{rank}.stdout")

    def stderr(self, rank: int) -> str:
        """Return the standard error of the rank so far."""
        return _read(self.directory / f"rank{rank}.stderr")

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank (not to its children)."""
        self.ranks[rank].send_signal(number)

    def kill_all(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to every rank, as Ctrl-C in a terminal or the time limit of a cluster does."""
        for rank in self.ranks:
            rank.send_signal(number)

    def wait(self, timeout: float = 240.0) -> list[int]:
        """Wait for every rank to end; return the exit codes in rank order, minus the signal's number if a signal ended
        it.

        Raises:
            RankTimeout: ranks were still running after `timeout` seconds; the message has their stacks and stderr.
        """
        if running := wait_for_exit(self.ranks, timeout):
            stacks = {rank.number: rank.stacks() for rank in running}
            self.close()
            raise RankTimeout(self._report(f"still ran after {timeout:g} s", stacks), stacks)
        return [rank.exit_code for rank in self.ranks if rank.exit_code is not None]

    def wait_as_launcher(self, timeout: float = 240.0) -> int:
        """Wait as torchrun does: after a rank has failed, end the others with SIGTERM, then with SIGKILL.

        Returns the exit code of the first that failed, or 0. Raises RankTimeout as `wait` does.
        """
        deadline = time.monotonic() + timeout
        while True:
            codes = [rank.exit_code for rank in self.ranks]
            failed = [code for code in codes if code]
            if failed or None not in codes or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if failed:
            self.kill_all(signal.SIGTERM)
            wait_for_exit(self.ranks, _GRACE_SECONDS)
            self.kill_all(signal.SIGKILL)
        self.wait(max(deadline - time.monotonic(), 5.0))
        return failed[0] if failed else 0

    def wait_for_output(self, rank: int, text: str, timeout: float = 240.0) -> None:
        """Wait until the rank's standard output contains `text`.

        Raises:
            RankFailure: the rank ended without it.
            RankTimeout: it was not there after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = self.ranks[rank].exit_code is not None  # first, so that the file has all output of an ended rank
            if text in self.stdout(rank):
                return
            if ended:
                failures = {rank: self.ranks[rank].describe_exit()}
                raise RankFailure(self._report(f"ended without printing {text!r}", failures), failures)
            if time.monotonic() > deadline:
                stacks = {rank: self.ranks[rank].stacks()}
                self.close()
                raise RankTimeout(self._report(f"did not print {text!r} within {timeout:g} s", stacks), stacks)
            time.sleep(0.01)

    def close(self) -> None:
        """Kill the ranks that still run, and their children."""
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                assert rank.process.pid is not None
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.kill()

    def _report(self, what: str, details: dict[int, str]) -> str:
        return "\n\n".join(
            f"rank {number} of {self.world_size} {what}\n{detail}\nstandard error ended:\n{self.stderr(number)[-2000:]}"
            for number, detail in sorted(details.items())
        )


@dataclass(frozen=True)
class Ended:
    """Script that has ended."""

    code: int
    """Exit code, minus the signal's number if a signal ended it."""
    stdout: str
    stderr: str


def run_script(
    argv: Sequence[str | Path],
    directory: Path,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Ended:
    """Run `python argv...` to its end in one forked process, as a user does: without a launcher's variables.

    In place of `subprocess.run([sys.executable, ...])`, which imports torch anew: seconds. `argv[0]` is the path of a
    script. The process has imported torch and most of megalite before it starts, so a test of what a program imports,
    or of its start, needs a new interpreter. Its environment is `environment` on top of the fork server's: what a test
    has changed in `os.environ` is not in it. `directory` gets its output; it must differ for scripts that run at the
    same time.

    Returns its exit code, standard output and standard error.

    Raises:
        RankTimeout: it still ran after four minutes.
    """
    with Job(argv, 1, directory, environment, told=[{}], cwd=cwd) as job:
        (code,) = job.wait()
        return Ended(code, job.stdout(0), job.stderr(0))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _shared_environment(world_size: int, port: int, *, agent_store: bool) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": str(agent_store),
    }


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _enter(argv: list[str], environment: dict[str, str], output: Path, cwd: Path | None) -> None:
    """Become the process that `python argv...` would be."""
    os.setpgid(0, 0)
    output = output.absolute()
    if cwd is not None:
        os.chdir(cwd)
    for stream, suffix in ((sys.stdout, ".stdout"), (sys.stderr, ".stderr")):
        with output.with_suffix(suffix).open("wb") as file:
            os.dup2(file.fileno(), 1 if stream is sys.stdout else 2)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for inherited in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        inherited.atexit = False  # operators that torch takes back at the end: 0.1 s for a process that ends anyway
    os.environ.update(environment)
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit:
        raise  # its code becomes the exit code of the process
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()  # a forked process does not run them

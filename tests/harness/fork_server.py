"""A process that imported torch once and has run nothing since: ranks are forked from it.

Forking the test process itself is not safe once it has run a backward pass or an OpenMP region, and a fresh
interpreter spends seconds importing torch. This is the standard library's fork server, with our modules preloaded.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any


class RankFailure(Exception):
    """Ranks raised, died or did not answer; `failures` tells of each (rank: traceback, signal or stacks)."""

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


class RankTimeout(RankFailure):
    """Ranks did not answer, or did not end, in time; `failures` holds their stacks."""


def fork_context() -> ForkServerContext:
    """The fork server's context; the server is started at the first call and ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.preload"])
    # Thread pools are sized when a library is loaded: one thread a rank, for results that do not depend on the machine.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # The server looks for modules where this process does.
    with _environment(threads | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
        forkserver.ensure_running()
    return context


class Rank:
    """One process forked from the server.

    Args:
        number: the rank, for messages.
        stacks: the file that its stacks are written to on SIGUSR2.
        target, arguments: what it runs, `target(*arguments)`; an exception ends it as it ends the interpreter.
        daemon: a daemon may have no children of its own, and does not outlive this process.
    """

    def __init__(
        self, number: int, stacks: Path, target: Callable[..., None], arguments: tuple[Any, ...], daemon: bool
    ) -> None:
        self.number = number
        self._stacks = stacks
        self.process = fork_context().Process(
            target=_run, args=(stacks, target, arguments), name=f"rank {number}", daemon=daemon
        )
        self.process.start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""
        return self.process.exitcode

    def describe_exit(self) -> str:
        """How the process ended, in words, e.g. 'was killed by SIGKILL'; waits for the end."""
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process; nothing happens if it has ended."""
        if self.process.pid is not None and self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Ends the process and waits for its end."""
        self.process.kill()
        self.process.join()

    def stacks(self, seconds: float = 5.0) -> str:
        """Where every thread of the process stands now, in Python, most recent call first."""
        before = self._stacks.stat().st_size if self._stacks.exists() else -1
        if before < 0 or self.exit_code is not None:
            return "(it has not started, or has ended)"
        self.send_signal(signal.SIGUSR2)
        size, deadline = before, time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.05)
            previous, size = size, self._stacks.stat().st_size
            if size == previous > before:  # the dump has stopped growing
                break
        return self._stacks.read_bytes()[before:].decode(errors="replace").rstrip() or "(no stacks came)"


def wait_for_exit(ranks: list[Rank], seconds: float) -> list[Rank]:
    """Waits until all of `ranks` have ended or `seconds` have passed; returns those still running."""
    deadline = time.monotonic() + seconds
    while running := [rank for rank in ranks if rank.exit_code is None]:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        connection.wait([rank.process.sentinel for rank in running], timeout=left)
    return running


def running(process_id: int) -> bool:
    """Whether a process, not necessarily a child, runs (a zombie does not)."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def loopback_interface() -> str | None:
    """The name of the loopback network interface, which gloo is told to use: it would look up the host's name."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run(stacks: Path, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """The first thing that runs in a forked process."""
    stacks_file = stacks.open("wb")  # held open for as long as the process lives
    faulthandler.register(signal.SIGUSR2, file=stacks_file, all_threads=True)
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    target(*arguments)


def _end_with_parent() -> None:
    """A rank stuck in a collective would otherwise outlive a test process that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)

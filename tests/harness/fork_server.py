"""Process that has imported torch and has run nothing since: ranks are forked from it.

Forking the test process itself is not safe once it has run a backward pass or an OpenMP region, and a new interpreter
needs seconds to import torch. This is the standard library's fork server, with preloaded modules.
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
    """Error of ranks that raised, died or did not answer; `failures` has the traceback, signal or stacks of each."""

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


class RankTimeout(RankFailure):
    """Error of ranks that did not answer, or did not end, in time; `failures` has their stacks."""


def fork_context() -> ForkServerContext:
    """Return the fork server's context; the server starts at the first call and ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.preload"])
    # Thread pools get their size when a library is loaded: one thread per rank, for results that do not depend on the
    # machine.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # The server searches for modules in the same folders as this process.
    with _environment(threads | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
        forkserver.ensure_running()
    return context


class Rank:
    """Process forked from the server.

    Args:
        number: rank, for messages.
        stacks: file for its stacks, written on SIGUSR2.
        target, arguments: it runs `target(*arguments)`; an exception ends it as it ends the interpreter.
        daemon: True for a process that ends with this process and may have no children.
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
        """Return the exit code, minus the signal's number if a signal ended the process; None while it runs."""
        return self.process.exitcode

    def describe_exit(self) -> str:
        """Describe how the process ended, for example 'was killed by SIGKILL', after waiting for its end."""
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    @property
    def state(self) -> str:
        """Return the letter of the process's state, as `state` does."""
        assert self.process.pid is not None
        return state(self.process.pid)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process; nothing happens if it has ended."""
        if self.process.pid is not None and self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self.process.kill()
        self.process.join()

    def stacks(self, seconds: float = 5.0) -> str:
        """Return the current Python stacks of all threads of the process, most recent call first."""
        before = self._stacks.stat().st_size if self._stacks.exists() else -1
        if before < 0 or self.exit_code is not None:
            return "(it has not started, or has ended)"
        self.send_signal(signal.SIGUSR2)
        size, deadline = before, time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.05)
            previous, size = size, self._stacks.stat().st_size
            if size == previous > before:  # the dump is complete: it no longer grows
                break
        return self._stacks.read_bytes()[before:].decode(errors="replace").rstrip() or "(no stacks came)"


def wait_for_exit(ranks: list[Rank], seconds: float) -> list[Rank]:
    """Wait until all of `ranks` have ended or `seconds` have passed; return those still running."""
    deadline = time.monotonic() + seconds
    while running := [rank for rank in ranks if rank.exit_code is None]:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        connection.wait([rank.process.sentinel for rank in running], timeout=left)
    return running


def running(process_id: int) -> bool:
    """Tell whether a process, not necessarily a child, is running (a zombie is not)."""
    return state(process_id) not in ("", "Z")


def state(process_id: int) -> str:
    """Return the letter that Linux has for the state of a process, "T" for one that is suspended; "" without one."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return status.rpartition(")")[2].split()[0]


def loopback_interface() -> str | None:
    """Return the name of the loopback network interface, for gloo, which would otherwise look up the host's name."""
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
    """Entry point of a forked process."""
    stacks_file = stacks.open("wb")  # stays open until the process ends
    faulthandler.register(signal.SIGUSR2, file=stacks_file, all_threads=True)
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    target(*arguments)


def _end_with_parent() -> None:
    """End with the parent: a rank stuck in a collective would otherwise outlive a killed test process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)

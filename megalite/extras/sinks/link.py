"""Link from rank 0 to the process of its services."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict

from megalite.extras.sinks.background import CLOSE_S
from megalite.extras.sinks.description import Description
from megalite.process.programs import command_of, start
from megalite.training.metrics import Value

WAITING = 1 << 20
"""Most bytes that wait for the process, if it does not even read. The newest records are dropped then."""
_GRACE_S = 2.0
ENDED: Mapping[str, object] = {"ended": True}
"""Line that says that the run has ended: without it, its process was killed."""


class ServiceProcess:
    """Sink that gives records to the process of services. It never raises, and waits for nothing but in `close`.

    `tell`: takes a message to the user.
    """

    def __init__(self, description: Description, tell: Callable[[str], None], *, close_s: float = CLOSE_S) -> None:
        self._tell, self._close_s = tell, close_s
        self._waiting, self._dropped, self._messages, self._over = bytearray(), 0, b"", False
        self._process = start(
            command_of("megalite.extras.sinks.process", "main", str(close_s)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the run's to answer, and all that libraries start can be killed
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        self._put(asdict(description))

    def write(self, record: Mapping[str, Value]) -> None:
        """Pass a record on, without waiting."""
        self._put(record)
        self._pass_on_messages()

    def _put(self, line: Mapping[str, object]) -> None:
        """Write a line, or as much of it as the pipe takes: the rest is written before the next line."""
        if self._over:
            return
        if len(self._waiting) > WAITING:
            self._dropped += 1
        else:
            self._waiting += json.dumps(line).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        """Write as much of what waits as the pipe takes."""
        try:
            while self._waiting:
                del self._waiting[: os.write(self._to, self._waiting)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._over = True
            self._tell(
                f"WARNING: the process of the services of --report-to has ended ({error.strerror}), and they get "
                "nothing from here on. The run continues, and metrics.jsonl has all records"
            )

    def _pass_on_messages(self) -> None:
        with suppress(BlockingIOError):
            while some := os.read(self._from, 1 << 16):
                self._messages += some
        *lines, self._messages = self._messages.split(b"\n")
        for line in lines:
            self._tell(line.decode(errors="replace"))

    def close(self) -> None:
        """Wait until the process has sent all, for a bounded time, and end it."""
        process, end = self._process, time.monotonic() + self._close_s + _GRACE_S
        self._put(ENDED)
        while self._waiting and not self._over and (left := end - time.monotonic()) > 0:
            if select.select([], [self._to], [], left)[1]:
                self._write()
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        if process.poll() not in (0, None) and not self._over:
            self._tell("WARNING: the process of the services of --report-to has failed: they may lack records")
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._pass_on_messages()
        if self._dropped:
            self._tell(f"{self._dropped} records were dropped: the process of the services of --report-to hung")
        assert process.stdout is not None
        process.stdout.close()

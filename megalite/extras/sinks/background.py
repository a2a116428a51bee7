"""Services behind threads: none can stop a run, nor delay it.

Each service has a thread of its own, so that one that hangs delays no other. A step appends its record to the queues,
and nothing else. A thread wakes every few seconds and sends what is there. A full queue drops its oldest record: who
looks at a run wants to know how it is now, and metrics.jsonl has all of them. A service that fails is tried again: runs
take months, and a collector may be restarted. One that cannot be opened is left out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from megalite.extras.sinks.masking import masked
from megalite.training.metrics import Value

Record = Mapping[str, Value]
QUEUE = 1000
"""Most records that wait for a service."""
PATIENCE_S = 120.0
"""Longest call of a service. One that takes longer hangs, which is told; its records wait until it answers."""
LONGEST_PAUSE_S = 300.0
"""Longest time between two calls of a service that fails: each failure in a row doubles it."""
CLOSE_S = 8.0
"""Longest wait at the end of a run for what is not sent yet, of all services together."""


class Service(Protocol):
    """Service that gets records. Its methods are called on one thread, and may raise anything."""

    name: str
    interval_s: float
    """Seconds between two calls of `send`."""

    def open(self) -> None:
        """Reach the service, and give it the configuration."""

    def send(self, records: Sequence[Record]) -> None:
        """Send records, at least one."""

    def close(self, *, ended: bool) -> None:
        """Send what is left, and say that the run has ended, or, if not `ended`, that it was killed."""


class Background:
    """Sink that passes records on to services. It never raises, and `close` waits for a bounded time.

    `tell`: takes a message to the user. It is called on the thread that calls `write` and `close`.
    """

    def __init__(
        self,
        services: Sequence[Service],
        tell: Callable[[str], None],
        *,
        queue: int = QUEUE,
        patience_s: float = PATIENCE_S,
        close_s: float = CLOSE_S,
    ) -> None:
        self._workers = [_Worker(service, queue, patience_s) for service in services]
        self._tell, self._close_s = tell, close_s
        for worker in self._workers:
            worker.start()

    def write(self, record: Record) -> None:
        """Leave a record to the threads."""
        for worker in self._workers:
            worker.put(record)
            for message in worker.news():
                self._tell(message)

    def close(self, *, ended: bool = True) -> None:
        """Wait until all is sent, for a bounded time. `ended`: False if the run was killed."""
        for worker in self._workers:
            worker.ended = ended
            worker.ends.set()
        end = time.monotonic() + self._close_s
        for worker in self._workers:
            worker.join(max(0.0, end - time.monotonic()))
            for message in (*worker.news(), *worker.last_news(self._close_s)):
                self._tell(message)


class _Worker(threading.Thread):
    """Thread of one service."""

    def __init__(self, service: Service, queue: int, patience_s: float) -> None:
        super().__init__(name=f"sink {service.name}", daemon=True)
        self.ends, self.ended = threading.Event(), True
        self._service, self._patience_s = service, patience_s
        self._queue: deque[Record] = deque(maxlen=queue)
        self._put = self._taken = 0
        self._called: float | None = None
        self._lost = 0
        self._error: str | None = None
        """Reason why the service is left out."""
        self._failure: str | None = None
        """Reason why it has not taken the records of the last call."""
        self._left_out = self._told_full = self._told_failure = False

    def put(self, record: Record) -> None:
        """Append a record, in place of the oldest if the queue is full."""
        if not self._left_out:
            self._queue.append(record)
            self._put += 1

    def run(self) -> None:
        """Send records until the end."""
        try:
            self._call(self._service.open)
        except BaseException as error:  # libraries of services even raise SystemExit
            self._error = _described(error)
            return
        pause = self._service.interval_s
        while not self.ends.wait(pause):
            self._send()
            pause = self._service.interval_s if self._failure is None else min(2 * pause, LONGEST_PAUSE_S)
        self._send()
        self._attempt(lambda: self._service.close(ended=self.ended))

    def _send(self) -> None:
        records = [self._queue.popleft() for _ in range(len(self._queue))]
        self._taken += len(records)
        if not records:
            return
        if self._attempt(lambda: self._service.send(records)):
            self._failure = None
        else:
            self._lost += len(records)

    def _attempt(self, function: Callable[[], None]) -> bool:
        """Call the service, and tell whether it has not failed."""
        try:
            self._call(function)
        except BaseException as error:
            self._failure = _described(error)
            return False
        return True

    def _call(self, function: Callable[[], None]) -> None:
        self._called = time.monotonic()
        try:
            function()
        finally:
            self._called = None

    def news(self) -> Iterator[str]:
        """Yield what the user is to know and has not been told."""
        if self._left_out:
            return
        if self._error is not None:
            self._left_out = True
            yield (
                f"WARNING: {self._service.name} is left out from here on: {self._error}. The run continues, and "
                "metrics.jsonl has all records"
            )
            return
        called = self._called
        seconds = 0.0 if called is None else time.monotonic() - called
        why = f"it has not answered for {seconds:.0f} s" if seconds > self._patience_s else self._failure
        if (why is not None) != self._told_failure:
            self._told_failure = why is not None
            yield (
                f"{self._service.name} takes records again"
                if why is None
                else f"WARNING: {self._service.name} takes no records: {why}. It is tried again while the run "
                "continues, and metrics.jsonl has all records"
            )
        if len(self._queue) == self._queue.maxlen and not self._told_full:
            self._told_full = True
            yield (
                f"WARNING: {self._service.name} is slower than the run: {len(self._queue)} records wait for it, and "
                "the oldest are dropped. metrics.jsonl has all of them"
            )

    def last_news(self, waited_s: float) -> Iterator[str]:
        """Yield, after the end, what has not been sent."""
        if self.is_alive() and not self._left_out:
            yield f"WARNING: {self._service.name} has not taken all records within {waited_s:g} s after the last step"
        lost = self._put - self._taken - len(self._queue) + self._lost
        if lost and not self._left_out:
            yield f"{self._service.name}: {lost} of {self._put} records were lost: it failed or was too slow"


def _described(error: BaseException) -> str:
    return masked(f"{type(error).__name__}: {error}")

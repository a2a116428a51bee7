"""Long work of one process: over threads, and shown while it goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

INTERVAL = 10.0
"""Seconds between two lines where standard error is not a terminal."""

Advance = Callable[[int], None]
"""Told of each so many bytes that are done, from any thread."""


def in_threads(workers: int, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The results in the order of the items. The first error ends it: what has not begun is left undone."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def show_progress(doing: str, total: int) -> Iterator[Advance]:
    """Gives what shows the bytes done, of `total`, on standard error: a bar on a terminal, elsewhere lines."""
    if not sys.stderr.isatty():
        yield _Lines(doing, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn(doing), *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda size: bar.advance(task, size)


class _Lines:
    def __init__(self, doing: str, total: int) -> None:
        self.doing, self.total, self.done = doing, total, 0
        self.next = time.monotonic() + INTERVAL
        self.lock = Lock()

    def __call__(self, size: int) -> None:
        with self.lock:
            self.done += size
            if time.monotonic() >= self.next:
                self.next = time.monotonic() + INTERVAL
                print(f"{self.doing}: {self.done:,} of {self.total:,} bytes", file=sys.stderr, flush=True)

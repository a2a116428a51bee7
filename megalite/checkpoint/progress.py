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
"""Told of each so many bytes, or other units, that are done, from any thread."""


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
def show_progress(doing: str, total: int, unit: str = "bytes") -> Iterator[Advance]:
    """Gives what shows the units done, of `total`, on standard error: a bar on a terminal, elsewhere lines."""
    if not sys.stderr.isatty():
        yield _Lines(doing, total, unit)
        return
    from rich import progress
    from rich.console import Console

    counts: list[progress.ProgressColumn] = [progress.MofNCompleteColumn(), progress.TextColumn(unit)]
    if unit == "bytes":
        counts = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
    columns = [progress.TextColumn(doing), progress.BarColumn(), *counts, progress.TimeRemainingColumn()]
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda size: bar.advance(task, size)


class _Lines:
    def __init__(self, doing: str, total: int, unit: str) -> None:
        self.doing, self.total, self.unit, self.done = doing, total, unit, 0
        self.next = time.monotonic() + INTERVAL
        self.lock = Lock()

    def __call__(self, size: int) -> None:
        with self.lock:
            self.done += size
            if time.monotonic() >= self.next:
                self.next = time.monotonic() + INTERVAL
                print(f"{self.doing}: {self.done:,} of {self.total:,} {self.unit}", file=sys.stderr, flush=True)

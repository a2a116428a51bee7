"""Long work of one process: run over threads, with its progress shown."""

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
"""Seconds between two lines if standard error is not a terminal."""

Advance = Callable[[int], None]
"""Function that is told of each amount of bytes, or other units, that is done, from any thread."""


def in_threads(workers: int, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return the results in the order of the items. After the first error, no further items are started."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def show_progress(doing: str, total: int, unit: str = "bytes") -> Iterator[Advance]:
    """Yield a function that shows the units done, of `total`, on standard error: as a bar on a terminal, else as
    lines."""
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

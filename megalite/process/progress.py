"""Long work of one process: thread pools, and progress on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from megalite.process.output import say

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

Item = TypeVar("Item")
Result = TypeVar("Result")

INTERVAL = 10.0
"""Seconds between lines of `show_progress` if standard error is not a terminal."""

Advance = Callable[[int], None]
"""Function to call with each number of bytes (or other units) done since the last call. Any thread may call it."""
Show = Callable[[int, float, str], None]
"""Function to call with the number of documents done, the fraction of the work done (0 if unknown), and a text that
describes both."""


def in_threads(workers: int, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call the function for each item, in threads, and return the results in the order of the items.

    After the first error, no further items are started.
    """
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def show_progress(doing: str, total: int, unit: str = "bytes") -> Iterator[Advance]:
    """Yield a function that shows progress towards `total` units: as a bar on a terminal, otherwise as lines."""
    if not sys.stderr.isatty():
        yield _line_per_interval(doing, total, unit)
        return
    from rich import progress

    counts: list[ProgressColumn] = [progress.MofNCompleteColumn(), progress.TextColumn(unit)]
    if unit == "bytes":
        counts = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
    with _bar(progress.TextColumn(doing), progress.BarColumn(), *counts, progress.TimeRemainingColumn()) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda size: bar.advance(task, size)


def _line_per_interval(doing: str, total: int, unit: str) -> Advance:
    """Return a function that is told of progress, and prints a line of it once in a while."""
    done, next_line, lock = 0, time.monotonic() + INTERVAL, Lock()

    def advance(size: int) -> None:
        nonlocal done, next_line
        with lock:
            done += size
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + INTERVAL
                say(f"{doing}: {done:,} of {total:,} {unit}", to_error=True)

    return advance


@contextmanager
def show_documents(log_interval: int) -> Iterator[Show]:
    """Yield a function that shows the progress of preprocessing.

    On a terminal it shows a bar, otherwise one line per `log_interval` documents.
    """
    if not sys.stderr.isatty():
        yield _line_per_documents(log_interval)
        return
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    with _bar(BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as bar:
        task = bar.add_task("starting", total=None)

        def show(documents: int, fraction: float, description: str) -> None:
            bar.update(task, completed=fraction, total=1.0 if fraction else None, description=description)

        yield show


def _line_per_documents(log_interval: int) -> Show:
    next_line = log_interval

    def show(documents: int, fraction: float, description: str) -> None:
        nonlocal next_line
        if documents >= next_line:
            next_line = (documents // log_interval + 1) * log_interval
            say(description, to_error=True)

    return show


def _bar(*columns: ProgressColumn) -> Progress:
    """Return a bar that disappears at its end. Until then, lines written to `sys.stderr` appear above it."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(stderr=True), transient=True)

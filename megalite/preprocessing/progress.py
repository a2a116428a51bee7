"""Progress of preprocessing: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from megalite.data.documents import BadRecord
from megalite.preprocessing.preprocess import Observer, Progress

# Of records that are left out, so many are named.
NAMED = 20


@contextmanager
def show_progress(log_interval: int) -> Iterator[Observer]:
    """Yield the observer that shows a run on standard error.

    Args:
        log_interval: documents between two lines if standard error is not a terminal.
    """
    if not sys.stderr.isatty():
        yield Observer(_print, _Lines(log_interval), _Skipped())
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def update(progress: Progress) -> None:
            total = 1.0 if progress.fraction else None
            bar.update(task, completed=progress.fraction, total=total, description=_describe(progress))

        yield Observer(_print, update, _Skipped())


class _Lines:
    def __init__(self, log_interval: int) -> None:
        self.log_interval = log_interval
        self.next = log_interval

    def __call__(self, progress: Progress) -> None:
        if progress.documents >= self.next:
            self.next = (progress.documents // self.log_interval + 1) * self.log_interval
            _print(_describe(progress))


class _Skipped:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, record: BadRecord) -> None:
        self.count += 1
        if self.count <= NAMED:
            _print(f"left out {record.place}: {record.reason}")
        if self.count == NAMED:
            _print("more that are left out are only counted")


def _print(line: str) -> None:
    """Print a line above the bar, if there is one: the bar takes over `sys.stderr`."""
    print(line, file=sys.stderr, flush=True)


def _describe(progress: Progress) -> str:
    rates = f"{progress.documents_per_second:,.0f} documents/s, {progress.tokens_per_second:,.0f} tokens/s"
    line = f"{progress.documents:,} documents, {progress.tokens:,} tokens, {rates}"
    if progress.seconds_left is not None:
        line += f", {timedelta(seconds=round(progress.seconds_left))} left"
    return line

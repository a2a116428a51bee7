"""How far preprocessing is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megalite.data.preprocess import Progress


@contextmanager
def show_progress(inputs: Sequence[str], log_interval: int) -> Iterator[Callable[[Progress], None]]:
    """Gives the function to report progress to.

    Args:
        inputs: the files; where all are plain, their sizes say how much there is.
        log_interval: documents between two lines where standard error is not a terminal.
    """
    if not sys.stderr.isatty():
        yield _Lines(log_interval)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    plain = all(Path(path).is_file() and not path.endswith(".gz") for path in inputs)
    total = sum(Path(path).stat().st_size for path in inputs) if plain else None
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda progress: bar.update(task, completed=progress.text_bytes, description=_describe(progress))


class _Lines:
    def __init__(self, log_interval: int) -> None:
        self.log_interval = log_interval
        self.next = log_interval

    def __call__(self, progress: Progress) -> None:
        if progress.documents >= self.next:
            self.next = (progress.documents // self.log_interval + 1) * self.log_interval
            print(_describe(progress), file=sys.stderr, flush=True)


def _describe(progress: Progress) -> str:
    rate = progress.tokens / max(progress.seconds, 1e-9)
    return f"{progress.documents:,} documents, {progress.tokens:,} tokens, {rate:,.0f} tokens/s"

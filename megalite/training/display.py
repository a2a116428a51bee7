"""Display of a run: its configuration, progress and results.

On a terminal it shows a live bar with a curve of the loss, and above it a line every `log_interval` steps. To a log
file or a pipe it writes only the lines. Only the rank with `enabled` writes.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megalite.process.output import printable, write_out
from megalite.training.metrics import LARGEST_LOGIT, StepMetrics

_WIDTH = 40  # columns of the bar, and of the curve below it
_SHOWN = {"indexer_loss": "indexer loss", LARGEST_LOGIT: "max attention logit"}
"""Further figures of a step's line, which runs that have them are watched by."""
_RECENT_STEPS = 20  # the remaining time is estimated from the mean duration of these last steps


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error again: Rich would end the process without a message. Called inside the `except` block."""
        raise


class _LossyStream:
    """Stream that discards data which cannot be written (full disk). Raises BrokenPipeError if nobody reads it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.lost = stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        self._try(partial(self._stream.write, text))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BrokenPipeError:
            raise
        except OSError:
            self.lost = True


def _plain(text: str) -> str:
    """Return the text as rich prints it unchanged, without what would give commands to a terminal."""
    return escape(printable(text))


class Display:
    """Display of a run. A context manager: the bar is removed at the end of the block, also after an error.

    Args:
        train_iterations: total number of steps; None if it is not known.
        start_iteration: number of steps before this run resumed.
    """

    def __init__(
        self,
        train_iterations: int | None,
        log_interval: int,
        *,
        start_iteration: int = 0,
        enabled: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self._total, self._log_interval, self._enabled = train_iterations, log_interval, enabled
        self._iteration, self._first = start_iteration, start_iteration + 1
        self._stream = _LossyStream(stream or sys.stdout)
        self._console = _Console(file=cast(TextIO, self._stream), highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._losses = [math.nan] * _WIDTH
        self._times: deque[float] = deque(maxlen=_RECENT_STEPS)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop_bar()
        if self._stream.lost:  # drop output that is still buffered: otherwise it would fail at exit
            write_out()

    def summary(self, title: str, lines: Mapping[str, object]) -> None:
        """Print a titled block of names and values."""
        self._stop_bar()
        if self._enabled:
            width = max(map(len, lines), default=0)
            block = [f"  [dim]{_plain(name):{width}}[/]  {_plain(str(value))}" for name, value in lines.items()]
            self._console.print("\n".join([f"[bold]{_plain(title)}[/]", *block]))

    def message(self, text: str) -> None:
        """Print one line above the bar."""
        if self._enabled:
            self._console.print(_plain(text))

    def step(self, metrics: StepMetrics) -> None:
        if not self._enabled:
            return
        self._iteration = metrics.iteration
        self._times.append(metrics.iteration_time_s)
        at_interval = metrics.iteration % self._log_interval == 0
        if at_interval or metrics.skipped or metrics.iteration in (self._first, self._total):
            self._console.print(_plain(self._line(metrics)))
        if self._console.is_interactive:
            self._show(metrics)

    def evaluation(self, name: str, iteration: int, figures: Mapping[str, float]) -> None:
        """Print the figures of an evaluation."""
        if self._enabled:
            shown = [f"{figure} {value:.4f}" for figure, value in figures.items() if figure != "perplexity"]
            shown += [f"{figure} {value:.4g}" for figure, value in figures.items() if figure == "perplexity"]
            self._console.print(" | ".join([f"[bold]{name} at step {iteration}[/]", *map(_plain, shown)]))

    def sample(self, iteration: int, text: str) -> None:
        """Print a text that the network has written, set in, so that no line of it looks like one of the run."""
        self.message("\n  ".join([f"sample after step {iteration}:", *text.splitlines()]))

    def _line(self, metrics: StepMetrics) -> str:
        """Return the line of a step. A terminal has the bar besides, and gets no line that would wrap."""
        has_bar = self._console.is_interactive
        digits = 0 if self._total is None else len(str(self._total))
        of_total = "" if self._total is None or has_bar else f"/{self._total}"
        parts = [
            f"step {metrics.iteration:{digits}}{of_total}",
            f"loss {metrics.loss:.4f}",
            f"lr {metrics.learning_rate:.3e}",
            f"grad norm {metrics.grad_norm:.3f}",
            _speed(metrics),
            f"{1000 * metrics.iteration_time_s:,.0f} ms",
        ]
        if metrics.loss_scale != 1.0:
            parts.append(f"loss scale {metrics.loss_scale:,.0f}")
        parts += [f"{words} {metrics.extra[name]:.4g}" for name, words in _SHOWN.items() if name in metrics.extra]
        if (mfu := metrics.throughput.get("mfu")) is not None:
            parts.append(f"MFU {mfu:.1%}")
        if metrics.skipped:
            parts.append("skipped" if math.isfinite(metrics.grad_norm) else "skipped: not finite")
        elif self._total is not None and not has_bar:
            parts.append(f"ETA {self._remaining(self._total)}")
        return " | ".join(parts)

    def _remaining(self, total: int) -> timedelta:
        mean = sum(self._times) / len(self._times)
        return timedelta(seconds=round(mean * (total - self._iteration)))

    def _show(self, metrics: StepMetrics) -> None:
        """Draw the progress bar, the curve of the loss and the figures of a step over those of the step before."""
        figures = Table.grid(padding=(0, 2))
        if (total := self._total) is None:
            self._losses = [*self._losses[1:], metrics.loss]
            figures.add_row("", "step", f"[bold]{self._iteration}[/]", "")
        else:
            column = min((self._iteration - 1) * _WIDTH // total, _WIDTH - 1)
            end = max(column + 1, self._iteration * _WIDTH // total)
            self._losses[column:end] = [metrics.loss] * (end - column)
            figures.add_row(
                ProgressBar(total=total, completed=self._iteration, width=_WIDTH),
                f"[bold]{self._iteration / total:4.0%}[/]",
                f"{self._iteration}/{total}",
                f"ETA [cyan]{self._remaining(total)}[/]",
            )
        figures.add_row(
            Text("" if self._console.options.ascii_only else curve(self._losses), style="green"),
            "loss",
            f"[bold green]{metrics.loss:.4f}[/]",
            f"[cyan]{_speed(metrics)}[/]",
        )
        if self._live is None:
            # Each step refreshes the bar: a refresh thread would take time from the steps.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Group(Text(), figures), refresh=True)

    def _stop_bar(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _speed(metrics: StepMetrics) -> str:
    name, value = next(iter(metrics.throughput.items()))
    return f"{value or 0.0:,.0f} {name.removesuffix('_per_second')}/s"


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # `exp` of about 710 overflows


def curve(values: Sequence[float]) -> str:
    """Return the values as a row of bar characters, scaled to their range; non-finite values become spaces."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    bars = "▁▂▃▄▅▆▇█"
    return "".join(
        bars[min(int((value - low) / span * len(bars)), len(bars) - 1)] if math.isfinite(value) else " "
        for value in values
    )

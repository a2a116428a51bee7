"""When a run is to stop early: asked to by a signal, at a deadline, or after an interval.

Each rank sees its own signals and its own clock; the trainer makes the ranks agree, once a step, by the maximum.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NoReturn

from megalite.errors import EXIT_RESUMABLE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """While entered, the stop signals only set a flag. Enter it on the main thread.

    A launcher repeats signals (Ctrl-C reaches a rank from the terminal and again through torchrun, which kills it only
    after 30 s), so the second one means no more than the first: it is ignored even after leaving, while the process
    ends. If none came, leaving brings back the handlers from before.
    """

    def __init__(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        self._signals = signals
        self._received = 0
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._receive) for number in self._signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self._received else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number

    def local_request(self) -> int:
        """The number of the first stop signal that this rank received, 0 if none: a value to take the maximum of."""
        return self._received


def exit_on_stop_signals() -> None:
    """Until a `StopRequest` is entered there is nothing to save, and the run can be started again as it is.

    Silently, since a launcher ends ranks like this where another one has said what is wrong; Ctrl-C is left alone.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(EXIT_RESUMABLE)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, end)


@contextmanager
def default_signals() -> Iterator[None]:
    """While entered, a stop signal ends the process at once."""
    previous = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def ignore_stop_signals() -> None:
    """For a program that is ending anyway."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def deadline_passed(elapsed_seconds: float, exit_duration_in_mins: float | None) -> bool:
    """Whether a run that started `elapsed_seconds` ago has used up its `--exit-duration-in-mins`."""
    return exit_duration_in_mins is not None and elapsed_seconds >= 60.0 * exit_duration_in_mins


def interval_reached(iteration: int, exit_interval: int | None) -> bool:
    """Whether to exit after `iteration`, being a multiple of `--exit-interval`."""
    return exit_interval is not None and iteration % exit_interval == 0

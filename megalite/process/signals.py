"""Signals that ask a program to stop.

Each rank sees its own; the loop makes the ranks agree, once a step, by the maximum.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from megalite.errors import EXIT_RESUMABLE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SECONDS_FOR_MAIN_THREAD = 3.0
_last_words: list[Callable[[], None]] = []


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
        self._wakeup = -1

    def __enter__(self) -> StopRequest:
        self._wakeup = signal.set_wakeup_fd(-1)  # first: from here on no thread ends the process for a signal
        self._previous = {number: signal.signal(number, self._receive) for number in self._signals}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self._received else handler)
        signal.set_wakeup_fd(self._wakeup)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number

    def local_request(self) -> int:
        """The number of the first stop signal that this rank received, 0 if none: a value to take the maximum of."""
        return self._received

    def answered(self) -> None:
        """The program ends now, on this rank's signal or another's: those that still come are ignored, as above."""
        self._received = self._received or signal.SIGTERM


def exit_on_stop_signals() -> None:
    """Until a `StopRequest` is entered there is nothing to save, and the run can be started again as it is.

    The first signal raises in the main thread, so that what is half done is cleared away; those after it are ignored.
    Silently, since a launcher ends ranks like this where another one has said what is wrong, but for Ctrl-C.

    Python runs handlers on the main thread, between two bytecodes: if that thread is inside a library (rendezvous,
    collective, compiler), a handler may run only minutes later. So another thread is woken by the signal, too, and ends
    the process if the main thread does not.
    """

    ending = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ending
        if ending:
            return
        ending = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(EXIT_RESUMABLE)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGINT is for what a shell runs in the background
            signal.signal(number, end)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # the pipe is not its own
    threading.Thread(target=_end_for_main_thread, args=(reading,), name="signals", daemon=True).start()


def _end_for_main_thread(descriptor: int) -> NoReturn:
    """Wait for the number of a stop signal, then for the main thread, then no longer."""
    while not set(os.read(descriptor, 64)).intersection(STOP_SIGNALS):
        pass
    time.sleep(_SECONDS_FOR_MAIN_THREAD)
    for call in _last_words:
        call()
    os._exit(EXIT_RESUMABLE)


def last_words(call: Callable[[], None]) -> None:
    """Have this called, from another thread, if a stop signal ends the process without its main thread."""
    _last_words.append(call)


def ignore_stop_signals() -> None:
    """Ignore stop signals, in a program that is ending anyway."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)

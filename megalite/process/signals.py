"""Stop signals.

Each rank receives its own signals. The training loop combines them over all ranks by a maximum, once per step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from megalite.errors import EXIT_RESUMABLE
from megalite.process.bounded import within

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SECONDS_FOR_MAIN_THREAD = 3.0
_SECONDS_FOR_LAST_WORDS = 1.0
_last_words: list[Callable[[], None]] = []


class StopRequest:
    """Context manager in which stop signals only set a flag. Enter it on the main thread.

    Launchers repeat signals: Ctrl-C reaches a rank from the terminal and again through torchrun, which kills the rank
    only after 30 s. So further signals are ignored, also after the block, while the process ends. If no signal came,
    the previous handlers are restored after the block.
    """

    def __init__(self) -> None:
        self._received = 0
        self._previous: dict[signal.Signals, signal._HANDLER] = {}
        self._wakeup = -1

    def __enter__(self) -> StopRequest:
        self._wakeup = signal.set_wakeup_fd(-1)  # first: the thread of `exit_on_stop_signals` must not end the process
        self._previous = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self._received else handler)
        signal.set_wakeup_fd(self._wakeup)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number

    def local_request(self) -> int:
        """Return the number of the first stop signal that this rank received, or 0 if there was none."""
        return self._received

    def answered(self) -> None:
        """Ignore all later stop signals, because the program ends now, on a signal of this rank or of another one."""
        self._received = self._received or signal.SIGTERM


def exit_on_stop_signals() -> None:
    """End the process on a stop signal, until a `StopRequest` is entered: before that there is nothing to save.

    The first signal raises in the main thread, so that unfinished work is cleaned up. Later signals are ignored. Except
    for Ctrl-C nothing is printed: a launcher sends these signals to ranks after another rank has reported an error.

    Python runs handlers on the main thread, between two bytecodes. If that thread is inside a library (rendezvous,
    collective, compiler), a handler may run only minutes later. So a signal also wakes another thread, which ends the
    process if the main thread does not. It also does if what the handler raises is lost, as Python loses and prints
    whatever is raised while a finalizer runs; here nothing is printed.
    """

    ending = False
    report = sys.unraisablehook

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ending
        if ending:
            return
        ending = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(EXIT_RESUMABLE)

    def report_others(lost: sys.UnraisableHookArgs) -> None:
        if not (ending and isinstance(lost.exc_value, KeyboardInterrupt | SystemExit)):
            report(lost)

    sys.unraisablehook = report_others
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # shells ignore SIGINT for background jobs: keep that
            signal.signal(number, end)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # the pipe belongs to the parent process
    threading.Thread(target=_end_for_main_thread, args=(reading,), name="signals", daemon=True).start()


def _end_for_main_thread(descriptor: int) -> NoReturn:
    """Wait for a stop signal, give the main thread some seconds to end the process, then end it."""
    while not set(os.read(descriptor, 64)).intersection(STOP_SIGNALS):
        pass
    time.sleep(_SECONDS_FOR_MAIN_THREAD)
    for call in _last_words:
        with suppress(Exception):  # a file system or a peer that hangs must not keep the process from ending
            within(_SECONDS_FOR_LAST_WORDS, call)
    os._exit(EXIT_RESUMABLE)


def last_words(call: Callable[[], None]) -> None:
    """Register a call for the thread that ends the process on a stop signal if the main thread does not."""
    _last_words.append(call)


def ignore_stop_signals() -> None:
    """Ignore stop signals from now on, because the program is about to end."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)

"""A call that may never come back, and how long it is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return or raise as `call` does. Raises TimeoutError if it takes longer: it is left to its thread then.

    The client of a store waits without end for a process that stands still, whatever time-out it was given.
    """
    return aside(call).result(seconds)


def aside(call: Callable[[], T]) -> Future[T]:
    """Make the call in a thread of its own, which the process does not wait for when it ends."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="bounded call", daemon=True).start()
    return future

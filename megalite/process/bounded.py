"""Time limits for calls that may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Make a call with a time limit; return its result or raise its error.

    Raises TimeoutError if the call takes longer; it then keeps running in its thread. Calls of a store need this: they
    wait for ever for a store whose process is stopped, whatever time-out they were given.
    """
    return in_thread(call).result(seconds)


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Make the call in a separate daemon thread. The process does not wait for it at exit, unlike for an executor."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="bounded call", daemon=True).start()
    return future

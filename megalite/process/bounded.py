"""Time limits for calls that may hang."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Make a call with a time limit; return its result or raise its error.

    Raises TimeoutError if the call takes longer; it then keeps running in its thread.
    """
    return in_thread(call).result(seconds)


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Make the call in a separate daemon thread. The process does not wait for it at exit, unlike for an executor."""
    future: Future[T] = Future()
    threading.Thread(target=_make, args=(future, call), name="bounded call", daemon=True).start()
    return future


class Lane:
    """Daemon thread that makes many short calls, one after the other. Starts at the first, and ends with this object.

    A thread a call would take longer than what a store is asked.
    """

    def within(self, seconds: float, call: Callable[[], T]) -> T:
        """Return what `within` returns. The calls that follow one that hangs wait for it, within their own limits."""
        future: Future[T] = Future()
        self._calls.put(partial(_make, future, call))
        return future.result(seconds)

    @cached_property
    def _calls(self) -> SimpleQueue[Callable[[], None] | None]:
        calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_make_all, args=(calls,), name="bounded calls", daemon=True).start()
        weakref.finalize(self, calls.put, None)
        return calls


def _make_all(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    for make in iter(calls.get, None):
        make()
        del make  # it may hold the lane, which would never end


def _make(future: Future[Any], call: Callable[[], object]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)

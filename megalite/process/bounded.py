"""Time limits for calls that may hang."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property
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
    return Lane().begin(call)


class Lane:
    """Daemon thread for calls, one after the other: from the first call until this object is gone."""

    @cached_property
    def _calls(self) -> SimpleQueue[Any]:
        calls = SimpleQueue[Any]()
        threading.Thread(target=_make_all, args=(calls,), name="bounded calls", daemon=True).start()
        weakref.finalize(self, calls.put, None)
        return calls

    def begin(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future


def _make_all(calls: SimpleQueue[Any]) -> None:
    for future, call in iter(calls.get, None):
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del future, call  # they may hold the lane

"""Time limits for calls that may hang."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property
from itertools import starmap
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
    """Daemon thread for many short calls, one after the other: from the first call until this object is gone."""

    @cached_property
    def _calls(self) -> SimpleQueue[Any]:
        calls = SimpleQueue[Any]()
        in_thread(lambda: deque(starmap(_make, iter(calls.get, None)), maxlen=0))
        weakref.finalize(self, calls.put, None)
        return calls

    def within(self, seconds: float, call: Callable[[], T]) -> T:
        """Return what `within` returns. Calls that follow one that hangs wait for it, within their own limits."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future.result(seconds)


def _make(future: Future[Any], call: Callable[[], object]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)

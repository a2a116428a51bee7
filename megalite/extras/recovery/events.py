"""Events of a process with one thread: what can be read, and timers, each with the name of what it waits for."""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Callable
from typing import Any

Action = Callable[[], None]


class Events:
    """Loop that does something whenever a file can be read, or a timer is due."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: dict[str, tuple[float, Action]] = {}
        self._over = False

    def run(self) -> None:
        """Handle events until `stop`."""
        while not self._over:
            self.turn(max(self._next()[0] - time.monotonic(), 0.0))
            due, name = self._next()
            if due <= time.monotonic() and not self._over:
                self.expire(name)

    def _next(self) -> tuple[float, str]:
        """Return when a timer is due, and its name; infinity without any."""
        return min(((due, name) for name, (due, _) in self._timers.items()), default=(math.inf, ""))

    def turn(self, seconds: float) -> None:
        """Handle what can be read, and wait for it so long; infinity: for ever."""
        for key, _ in self._selector.select(None if seconds == math.inf else seconds):
            if not self._over and key.fd in self._selector.get_map():
                key.data()

    def stop(self) -> None:
        self._over = True

    def on_read(self, what: Any, action: Action) -> None:
        self._selector.register(what, selectors.EVENT_READ, action)

    def forget(self, what: Any) -> None:
        self._selector.unregister(what)

    def after(self, seconds: float, name: str, action: Action) -> None:
        """Do something after some time. Replaces the timer of this name."""
        self._timers[name] = time.monotonic() + seconds, action

    def hurry(self, seconds: float, name: str) -> None:
        """Have a timer, if there is one of this name, wait at most so long from now on."""
        if name in self._timers:
            due, action = self._timers[name]
            self._timers[name] = min(due, time.monotonic() + seconds), action

    def expire(self, name: str) -> None:
        _, action = self._timers.pop(name)
        action()

    def cancel_timers(self) -> None:
        self._timers.clear()

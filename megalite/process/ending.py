"""Functions that run when a program ends."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable


def at_exit(function: Callable[[], None]) -> None:
    """Have a function called when this process ends, while it can still start threads. It may be called twice.

    Functions of `atexit` run after the end of all executors of threads, without which nothing can be saved. Those of
    `threading` are not public. They do not run in a process that only calls those of `atexit`.
    """
    process = os.getpid()

    def of_this_process() -> None:
        if os.getpid() == process:  # worker processes of a dataset inherit the function
            function()

    atexit.register(of_this_process)
    threading._register_atexit(of_this_process)  # type: ignore[attr-defined]

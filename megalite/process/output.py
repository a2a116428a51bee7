"""Output of the program."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper


def require_streams() -> None:
    """Let everything be written: half a character is escaped; where this process began without standard output or error
    (`>&-`, some supervisors), what is written there goes nowhere."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # it stays open as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):  # Python escapes on standard error by itself
        with suppress(OSError):  # what was printed before, on a full disk: `write_out` tells
            sys.stdout.reconfigure(errors="backslashreplace")


def write_out() -> OSError | None:
    """Flush standard output. If that fails (full disk, closed pipe), drop the output and return the error: otherwise
    Python would fail at exit and change the exit code."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None

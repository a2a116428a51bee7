"""Processes that one launcher has started side by side, and how one of them ends another that stands still."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class _Process:
    """Facts that the system tells of a process."""

    user: int
    parent: int
    start: int


def start_of(process: int) -> int:
    """Return the time at which a process began, in ticks of the system: with its number, unique to the
    process. 0 if the system has no /proc."""
    try:
        return _look(process).start
    except OSError:
        return 0


def kill_sibling(process: int, start: int) -> str | None:
    """Kill a process of this one's user that this one's parent has started, too, and that began then (`start_of`).

    Returns why that was not done; None if it was, or the process has gone.
    """
    if not Path("/proc/self/stat").exists():
        return "this system does not tell who has started it"
    handle = None
    with suppress(OSError, AttributeError):  # before Linux 5.3, or where a container forbids it
        handle = os.pidfd_open(process)  # what is looked at now is what the signal goes to
    try:
        seen = _look(process)
        if process == os.getpid():
            return "it is the process that was to do it"
        if seen != _Process(os.getuid(), os.getppid(), start):
            return "it is not a process that the same launcher has started for this run"
        if handle is None:
            os.kill(process, signal.SIGKILL)
        else:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        pass
    except OSError as error:
        return str(error)
    finally:
        if handle is not None:
            os.close(handle)
    return None


def _look(process: int) -> _Process:
    """Raise OSError if there is none of this number, or no /proc."""
    folder = Path(f"/proc/{process}")
    fields = (folder / "stat").read_text().rpartition(")")[2].split()  # the name in front may hold anything
    return _Process(folder.stat().st_uid, int(fields[1]), int(fields[19]))

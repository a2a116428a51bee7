"""Processes and shared memory of a command, found by a mark in the environment that its processes inherit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "MEGALITE_CHAOS_MARK"
"""Variable of the environment whose value is another one in each trial."""
_SHARED = Path("/dev/shm")


def marked(mark: str) -> list[int]:
    """Return the living processes whose environment at their start had the mark; no zombies."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0") and _state(folder) not in "ZX":
                    found.append(int(folder.name))
    return found


def _state(folder: Path) -> str:
    return (folder / "stat").read_text().rpartition(")")[2].split()[0]


def name_of(process: int) -> str:
    """Return the command line of a process, shortened; "" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120].strip()
    return ""


def wait_for_end(mark: str, seconds: float) -> list[int]:
    """Wait until no marked process is left; return those that are left after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def end(mark: str) -> None:
    """Kill all marked processes, also those that they start meanwhile."""
    while processes := marked(mark):
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def shared_memory() -> set[str]:
    """Return the names in /dev/shm that belong to this user."""
    found = set()
    for path in _SHARED.iterdir() if _SHARED.is_dir() else ():
        with suppress(OSError):
            if path.stat().st_uid == os.getuid():
                found.add(path.name)
    return found


def unused(names: set[str]) -> Iterator[str]:
    """Yield those names in /dev/shm that no process has mapped or open: what a dead process has left behind.

    Other programs of the machine may create names while a command runs: they hold theirs, or have removed them by now.
    """
    held: set[str] = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                held |= {
                    line.rpartition("/")[2]
                    for line in (folder / "maps").read_text().splitlines()
                    if "/dev/shm/" in line
                }
            with suppress(OSError):
                for link in (folder / "fd").iterdir():
                    with suppress(OSError):
                        held.add(os.readlink(link).removeprefix(f"{_SHARED}/"))
    yield from sorted(name for name in names - held if (_SHARED / name).exists())

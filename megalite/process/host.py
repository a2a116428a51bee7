"""Machine on which this process runs."""

from __future__ import annotations

import errno
import os
import resource
import socket
from contextlib import suppress

from megalite.errors import ConfigurationError


def host_name() -> str:
    """Return the name that whoever starts jobs on this machine calls it by."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def process_space() -> str:
    """Return what two processes have in common that see each other by number: a machine, and a container on it."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not on Linux
        return socket.gethostname()


def raise_open_file_limit() -> None:
    """Allow this process as many open files as it may allow itself: the usual 1024 are few for data and a run."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS calls its limit infinite and refuses that number
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require_open_files(count: int) -> None:
    """Raise ConfigurationError if this process cannot open so many files more, however far it raises its limit."""
    raise_open_file_limit()
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise too_many_open_files(
            f"a start takes {count} more than are open, and there is room for {len(opened)}"
        ) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def too_many_open_files(why: str) -> ConfigurationError:
    """The error of a process that may not open a file or a connection more."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ConfigurationError(
        f"there are too many open files ({limit} are allowed to a process): raise the limit (ulimit -n 65536) and "
        f"start again; {why}"
    )

"""The machine on which this process runs: its name, its limits, sockets that listen, and processes of one launcher.

Sockets take connections on the interface of the job, and on no other.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.errors import ConfigurationError

_BACKLOG = 4096  # ranks come together
_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def host_name() -> str:
    """Return the name of this machine, as the scheduler knows it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def process_space() -> str:
    """Return a name for the process ID namespace: equal for processes that see each other by number."""
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
    """Return the error for a process that has reached its limit of open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ConfigurationError(
        f"there are too many open files ({limit} are allowed to a process): raise the limit (ulimit -n 65536) and "
        f"start again; {why}"
    )


# ---------------------------------------------------------------------------------------------------- sockets


def on_one_machine() -> bool:
    """Tell if all ranks run on this machine, as far as their launcher says so."""
    return os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE")


def listen(what: str, port: int = 0) -> socket.socket:
    """A socket that takes connections at the address that MASTER_ADDR has on this machine.

    Where it has none here (another machine passes connections on), or one that only this machine knows for a name that
    others know, it is every address, and a warning says so of `what`. Port 0: the system chooses one.

    Raises:
        OSError: the port is taken, or there is no socket.
    """
    host = os.environ.get("MASTER_ADDR", "localhost")
    for family, address in _addresses(host):
        try:
            return socket.create_server((address[0], port, *address[2:]), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise
    sys.stderr.write(
        f"warning: {what} listens on all interfaces, as MASTER_ADDR={host} leads to no address of this machine that "
        "others can reach: give one, and only its network comes in\n"
    )
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _addresses(host: str) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """Return a host's addresses as clients try them; without 127.0.1.1 and the like, by which some systems know their
    own name, where that name stands for this machine among others."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:  # who connects says what is wrong with it
        return []
    alone = on_one_machine() or host == "localhost" or _is_loopback(host)
    return [(family, address) for family, _, _, _, address in found if alone or not _is_loopback(str(address[0]))]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return False


# ---------------------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class _Process:
    """Facts about a process, from /proc."""

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

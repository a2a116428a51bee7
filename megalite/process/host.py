"""The machine of this process: its name, its limits, listening sockets, and processes of the same launcher.

Sockets listen on the interface that rank 0's host (MASTER_ADDR) belongs to, and on no other if possible.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.errors import ConfigurationError
from megalite.process.output import say
from megalite.process.place import Place

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_BACKLOG = 4096  # many ranks connect at the same time
_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def host_name() -> str:
    """Return the name of this machine, under SLURM the name of the node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def cores() -> int:
    """Return the number of cores that this process may use. Only Linux restricts a process to some of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_limit() -> int:
    """Return the bytes of memory that this process may use: the least of the limits of its control groups (cgroup v1
    and v2) and of what the machine has."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError):  # not on Linux
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                limits += _limits_of_groups(CGROUPS / ("memory" if controllers else ""), path.strip("/"))
    return min(limits)


def _limits_of_groups(root: Path, path: str) -> Iterator[int]:
    """Yield the limits of a control group and of those around it. A container may see only its own, as the root."""
    for group in (root / path, *(root / path).parents):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # "max" is no limit
                yield int((group / name).read_text())
        if group == root:
            return


def process_space() -> str:
    """Return a name of the process ID namespace. It is equal for processes that see each other's process IDs."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not on Linux
        return socket.gethostname()


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit: the usual 1024 are too few for data and connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS reports an infinite hard limit, and refuses to set it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require_open_files(count: int) -> None:
    """Raise ConfigurationError if this process cannot open `count` more files, after raising its soft limit."""
    raise_open_file_limit()
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise too_many_open_files(f"the start needs {count} more, but only {len(opened)} can be opened") from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def too_many_open_files(why: str) -> ConfigurationError:
    """Return the error for a process that has reached its limit of open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ConfigurationError(
        f"there are too many open files (the limit is {limit} per process): raise the limit (ulimit -n 65536) and "
        f"start again; {why}"
    )


# ---------------------------------------------------------------------------------------------------- sockets


def listen(what: str, place: Place, port: int = 0) -> socket.socket:
    """Open a socket of rank 0 that listens at the address at which the others look for it, if this machine has it.

    Otherwise it listens at every address, with a warning. This happens if another machine forwards the connections, or
    if rank 0's host is a name that leads only to a loopback address here.

    Args:
        what: name of the socket's user, for the warning.
        port: 0 lets the system choose a port.

    Raises:
        OSError: the port is in use, or no socket can be opened.
    """
    for family, address in _addresses(place):
        try:
            return socket.create_server((address[0], port, *address[2:]), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise
    say(
        f"warning: {what} listens on all interfaces, as MASTER_ADDR={place.host} is not an address of this machine "
        "that others can reach: give one to listen on its network only",
        to_error=True,
    )
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _addresses(place: Place) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """Return the addresses of rank 0's host, in the order in which clients try them.

    Some systems map their own name to a loopback address such as 127.0.1.1. It is left out if there are other machines,
    which cannot reach it.
    """
    try:
        found = socket.getaddrinfo(place.host, None, type=socket.SOCK_STREAM)
    except OSError:  # the later attempt to connect reports this error
        return []
    alone = place.on_one_machine or place.host == "localhost" or _is_loopback(place.host)
    return [(family, address) for family, _, _, _, address in found if alone or not _is_loopback(str(address[0]))]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a host name, not an address
        return False


# ---------------------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class _Process:
    """Facts about a process, from /proc."""

    user: int
    parent: int
    start: int


def start_of(process: int) -> int:
    """Return the start time of a process in system clock ticks. Process ID and start time together are unique.

    Returns 0 if the system has no /proc, or the process has ended.
    """
    try:
        return _look(process).start
    except OSError:
        return 0


def is_suspended(process: int) -> bool:
    """Tell if a process is stopped, as by SIGSTOP. False if the system has no /proc, or the process has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def kill_sibling(process: int, start: int) -> str | None:
    """Kill a process with SIGKILL, if it has this process's user and parent, and this start time (`start_of`).

    The checks prevent killing an unrelated process that has the same number now. Returns the reason if the process was
    not killed; None if it was killed or has ended.
    """
    if not Path("/proc/self/stat").exists():
        return "this system does not show which process started it"
    handle = None
    with suppress(OSError, AttributeError):  # not available before Linux 5.3, and forbidden in some containers
        handle = os.pidfd_open(process)  # opened before the checks: the signal reaches the process that was checked
    try:
        seen = _look(process)
        if process == os.getpid():
            return "it is the process that was to kill it"
        if seen != _Process(os.getuid(), os.getppid(), start):
            return "it was not started for this run by the same launcher"
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
    """Read the facts about a process. Raises OSError if it does not exist, or if there is no /proc."""
    folder = Path(f"/proc/{process}")
    fields = (folder / "stat").read_text().rpartition(")")[2].split()  # the name before ")" may contain spaces
    return _Process(folder.stat().st_uid, int(fields[1]), int(fields[19]))

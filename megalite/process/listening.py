"""Sockets that take connections: on the interface of the job, and on no other."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
from typing import Any

_BACKLOG = 4096  # ranks come together
_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


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

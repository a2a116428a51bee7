"""A connection between a rank's watchdog and the monitor: JSON objects, a line each.

Nothing that comes over it is ever unpickled. A rank proves by a token, which the ranks share through their process
group's store, that it is one of the run's.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from threading import Lock
from typing import Any

Message = dict[str, Any]

UNREACHABLE_SECONDS = 60.0
"""After which a connection is lost over which the other machine acknowledges nothing, since it has no power or network;
the system's own limit is a quarter of an hour."""
_SEND_SECONDS = 5.0
_LARGEST = 2**26  # bytes of a message


class LinkLost(Exception):
    """The other end has gone: its process has ended, or the connection was cut."""


class Link:
    """One end of a connection. Reading waits for nothing: ask when the socket has something."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._buffer = connection, b""
        self._sending, self._torn = Lock(), False
        connection.settimeout(_SEND_SECONDS)
        with suppress(OSError, AttributeError):  # not over TCP, or not on Linux
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREACHABLE_SECONDS))

    def fileno(self) -> int:
        """For `select`."""
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Send an object, from any thread. Where the other end has gone nothing happens: reading tells."""
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            if not self._torn:
                try:
                    self._connection.sendall(data)
                except OSError:  # a part of the line may have gone: nothing can follow it
                    self._torn = True

    def receive(self) -> list[Message]:
        """The objects that have come. Raises LinkLost at the end of the connection, or of sense."""
        try:
            data = self._connection.recv(2**16)
        except OSError as error:
            raise LinkLost from error
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if not data or len(self._buffer) > _LARGEST:
            raise LinkLost
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise LinkLost from error
        if not all(isinstance(message, dict) for message in messages):
            raise LinkLost
        return messages

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def listen() -> socket.socket:
    """A socket that takes connections on every address of this machine, on a port that the system chooses."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", 0), backlog=4096)

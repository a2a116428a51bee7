"""Messages between processes of one machine: JSON objects, one a line, on a socket between processes of one user."""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import suppress
from typing import Any

from megalite.small_files import parse_json

Message = dict[str, Any]
_LARGEST = 2**24  # bytes of a line: a large environment and command line
_PIECE = 2**16
_DESCRIPTORS = 3


class Ended(Exception):
    """Error when the other end is closed, or sends what is no message."""


class Lines:
    """End of a connection. Files that come with a message are kept until `close`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._buffer = connection, bytearray()
        self.descriptors: list[int] = []
        """Files that the other end has sent."""

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._connection.fileno()

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Send an object, with open files. A lost connection is ignored here: the next `receive` raises."""
        data = json.dumps(message).encode() + b"\n"
        with suppress(OSError):
            if descriptors:
                sent = socket.send_fds(self._connection, [data], descriptors)
                data = data[sent:]
            self._connection.sendall(data)

    def receive(self) -> list[Message]:
        """Return the objects that have come, at least one read. Raises Ended at the end of the connection."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._connection, _PIECE, _DESCRIPTORS)
        except OSError as error:
            raise Ended from error
        self.descriptors += descriptors
        searched = len(self._buffer)
        self._buffer += data
        messages = []
        while (end := self._buffer.find(b"\n", searched)) >= 0:
            messages.append(_parse(bytes(self._buffer[:end])))
            del self._buffer[: end + 1]
            searched = 0
        if not messages and (not data or len(self._buffer) > _LARGEST):
            raise Ended
        return messages

    def close_descriptors(self) -> None:
        """Close the files that have come: their readers wait until nobody holds them open."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def close(self) -> None:
        self.close_descriptors()
        self._connection.close()


def _parse(line: bytes) -> Message:
    try:
        message = parse_json(line)
    except ValueError as error:
        raise Ended from error
    if not isinstance(message, dict):
        raise Ended
    return message


def is_own(connection: socket.socket) -> bool:
    """Tell whether the other end belongs to this process's user, as the system says."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", found)[1] == os.geteuid())

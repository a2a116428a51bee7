"""Connection between a rank's watchdog and the monitor, and validation of the messages on it.

Messages are JSON objects, one per line, that no third party can forge.

Each end begins with a line of random digits. Each later line begins with a code: the HMAC-SHA256 of the line and its
number, with a key made of the run's secret (secret.py), the sender's role, and both ends' digits. So the first such
line proves that the other end knows the secret, and an attacker in between cannot forge, change, repeat, drop or return
a line. Nothing is parsed before its code has been checked, and nothing is ever unpickled.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

from megalite.small_files import parse_json

Message = dict[str, Any]

MONITOR, RANK = b"monitor", b"rank"
UNREACHABLE_SECONDS = 60.0
"""Seconds without acknowledgement from the other machine (without power or network) after which a connection is lost.
The system's own limit is 15 minutes."""
_SEND_SECONDS = 5.0
_LARGEST = 2**24  # bytes of a line; JSON that consists of brackets takes thirty times as much memory
_LARGEST_FIRST = 2**10  # bytes of a line before the other end has proved that it knows the secret
_DIGITS = re.compile(rb"[0-9a-f]{64}")
_LARGEST_NUMBER = 2**53
_LONGEST_TEXT = 2**8  # characters
_LONGEST_LINE = 500  # characters of a line of a report
_FOLDER = re.compile(r"[0-9]{8}T[0-9]{6}")


class LinkLost(Exception):
    """Error when the other end's process has ended, the connection was cut, or the other end does not know the
    secret."""


class Link:
    """End of a connection. Reading never blocks: read when the socket has data."""

    def __init__(self, connection: socket.socket, secret: bytes, role: bytes) -> None:
        """Set up. `role` is this end's role: MONITOR proves its identity first, RANK sends after that."""
        self._connection, self._buffer = connection, bytearray()
        self._secret, self._role = secret, role
        self._digits = secrets.token_hex(32).encode()
        self._sealing: _Seal | None = None
        self._opening: _Seal | None = None
        self.proved = False
        """True once the other end has shown that it knows the secret."""
        self._sending, self._torn = Lock(), False
        connection.settimeout(_SEND_SECONDS)
        with suppress(OSError, AttributeError):  # not over TCP, or not on Linux
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREACHABLE_SECONDS))
        self._send_line(self._digits)

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Send an object, from any thread. A lost connection is ignored here; the next `receive` raises."""
        data = json.dumps(message).encode()
        with self._sending:
            assert self._sealing is not None
            self._send_line(self._sealing.code(data) + b" " + data)

    def _send_line(self, line: bytes) -> None:
        if not self._torn:
            try:
                self._connection.sendall(line + b"\n")
            except OSError:  # a part of the line may have been sent: nothing can follow it
                self._torn = True

    def receive(self) -> list[Message]:
        """Return the objects that have come. Raises LinkLost at the end of the connection, or if a line is not
        valid."""
        largest = _LARGEST if self.proved else _LARGEST_FIRST
        try:
            data = self._connection.recv(min(2**16, largest))
        except OSError as error:
            raise LinkLost from error
        messages, searched = [], len(self._buffer)
        self._buffer += data
        while (end := self._buffer.find(b"\n", searched)) >= 0:
            line, searched = bytes(self._buffer[:end]), 0
            del self._buffer[: end + 1]
            if self._opening is None:
                self._meet(line)
            else:
                messages.append(self._open(line, self._opening))
        if not data or len(self._buffer) > largest:
            raise LinkLost
        return messages

    def _meet(self, digits: bytes) -> None:
        if not _DIGITS.fullmatch(digits):
            raise LinkLost
        other = RANK if self._role == MONITOR else MONITOR
        self._opening = _Seal(self._secret, other, digits, self._digits)
        self._sealing = _Seal(self._secret, self._role, self._digits, digits)
        if self._role == MONITOR:
            self.send()

    def _open(self, line: bytes, seal: _Seal) -> Message:
        code, _, data = line.partition(b" ")
        if not hmac.compare_digest(code, seal.code(data)):
            raise LinkLost
        self.proved = True
        with suppress(ValueError):
            message = parse_json(data)
            if isinstance(message, dict):
                return message
        raise LinkLost

    @property
    def unread(self) -> bool:
        """Tell whether something has come that `receive` has not read."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._connection.close()


class _Seal:
    """Codes of the lines in one direction; they must be requested in order."""

    def __init__(self, secret: bytes, sender: bytes, its_digits: bytes, other_digits: bytes) -> None:
        self._key = hmac.digest(secret, b" ".join((sender, its_digits, other_digits)), "sha256")
        self._number = 0

    def code(self, line: bytes) -> bytes:
        self._number += 1
        return hmac.digest(self._key, b"%d %s" % (self._number, line), "sha256").hex().encode()


def connect(host: str, port: int, secret: bytes, seconds: float) -> Link:
    """Return a rank's end of a connection to the monitor, which has proved that it knows the secret.

    Raises OSError if the connection is refused, and LinkLost if the other end is not the monitor or says nothing for
    `seconds`.
    """
    deadline = time.monotonic() + seconds
    connection = socket.create_connection((host, port), timeout=seconds)
    link = Link(connection, secret, RANK)
    connection.settimeout(seconds)
    while not link.proved:
        if time.monotonic() > deadline:
            raise LinkLost
        link.receive()
    connection.settimeout(_SEND_SECONDS)
    return link


# ------------------------------------------------------------------------------------------------------- messages


@dataclass
class Peer:
    """Identity and place of a rank, as the rank itself has sent it to the monitor."""

    rank: int
    host: str
    process: int
    start: int
    """Time when its process began (process/host.py)."""
    space: str
    """Namespace in which its process number is valid."""
    section: str = ""
    """Innermost section that it was last in."""
    step: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Peer:
        """Restore from `dataclasses.asdict` and JSON. Raises ValueError or KeyError if the values do not fit."""
        checked: dict[str, Any] = {name: whole(values[name]) for name in ("rank", "start", "step")}
        checked |= {name: words(values[name]) for name in ("host", "space", "section")}
        return cls(process=whole(values["process"], 2**31 - 1), **checked)

    def move(self, message: Message) -> None:
        """Take the section and the step of a message. Raises ValueError or KeyError if they do not fit."""
        self.section, self.step = words(message["section"]), whole(message["step"])

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"

    @property
    def place(self) -> str:
        return place_text(self.step, self.section)


def whole(value: Any, largest: int = _LARGEST_NUMBER) -> int:
    """Return a whole number of a message. Raises ValueError if it is not from 0 to the largest."""
    if type(value) is not int or not 0 <= value <= largest:
        raise ValueError("not a whole number within the limits")
    return value


def words(value: Any) -> str:
    """Return a short, printable text of a message. Raises ValueError if it is not one."""
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT or not value.isprintable():
        raise ValueError("not a short, printable text")
    return value


def exit_code(value: Any) -> int:
    """Return an exit code of a message. Raises ValueError if it is not one: the system would turn 256 into 0, which
    means success."""
    return whole(value, 255)


def place_text(step: int, section: str) -> str:
    return f'step {step}, "{section}"' if section else f"step {step}"


def alarm_of(message: Message) -> Message:
    """Return the part of a message on an overdue section or a failed communication; empty for any other message.

    Raises ValueError, TypeError or OverflowError if the values are not valid.
    """
    if "lost" in message:
        return {"lost": printable_line(str(message["lost"]))}
    if "overdue" in message:
        section, seconds, limit = message["overdue"]
        return {"overdue": [words(section), float(seconds), float(limit)]}
    return {}


def folder_name() -> str:
    """Return the name, by the time, of the folder that ranks write their dumps to."""
    return time.strftime("%Y%m%dT%H%M%S")


def folder_named(value: Any) -> str:
    """Return a `folder_name` of a message. Raises ValueError if it is not valid: it could be a path to any folder."""
    if not isinstance(value, str) or not _FOLDER.fullmatch(value):
        raise ValueError("not the name of a folder")
    return value


def printable_line(text: str) -> str:
    """Return a printable line of a text from ranks, which may have any length and contents."""
    cut = text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 3]}..."
    return "".join(one if one.isprintable() else "?" for one in " ".join(cut.split()))

"""Messages between a rank and the watchdog's monitor, after both have proved that they know the secret.

A conversation is a file of lines. The receiver is a real monitor, or the real watchdog of a rank, in the process of the
input. The sender seals each line, so that edited lines are parsed, and then corrupts bytes.
"""

from __future__ import annotations

import hmac
import json
import os
import random
import secrets
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tests.fuzz.edits import LINES, Edit, draw_edit, draw_path

if TYPE_CHECKING:
    from megalite.watchdog.link import Link
    from megalite.watchdog.monitor import Monitor

Lines = list[bytes]

SECRET = b"what the ranks of a run know and nobody else"
HANG, LOST, FAILS, LEAVES = "rank-hangs.jsonl", "rank-has-lost.jsonl", "rank-fails.jsonl", "rank-leaves.jsonl"
ASKS, ENDS, TELLS = "monitor-asks.jsonl", "monitor-ends.jsonl", "monitor-tells.jsonl"
FOLDER = "20261122T062148"
FILES = (HANG, LOST, FAILS, LEAVES, ASKS, ENDS, TELLS)
_SHORT_SECONDS = 0.5
"""Waited for what mostly comes, but not after each edit."""
_LONG_SECONDS = 30.0
"""Waited for what has to come: longer than an input may take."""
_BEGINNINGS = ("x", "x\n\nthread y:\n")
_SWOLLEN_TEXTS = ("a", "\n", '  File "', '  File "x/', '\n  File "', "\nthread ", "\x1b[2J")
_SWOLLEN_LISTS = ("0", "[]", "{}", '"x"', "1e9")
_MOST_LINES, _MOST_CHARACTERS = 40, 2000
"""Largest size of a message, and of each of its lines."""
_DIGITS = 64


def conversations() -> dict[str, Sequence[Any]]:
    """The valid ones, by their files."""
    from megalite.watchdog.hang_dump import RankDump
    from megalite.watchdog.snapshot import GroupRecord, Operation, Snapshot

    place = {"section": "optimizer", "step": 8}
    stacks = 'thread MainThread:\n  File "pretrain.py", line 7, in step\n\nthread loader:\n  File "a.py", line 1, in b'
    operations = tuple(Operation(number, "all_reduce", ((4, 2),), "float32", "started", 1.5) for number in (1, 2))
    groups = (GroupRecord("0", (0, 1), 2, operations), GroupRecord("link", (0, 1), 1, (), 3, 2))
    waits = RankDump(1, 3, "n1", 4711, "optimizer", 61.0, stacks, Snapshot(True, groups), 8)
    lags = replace(waits, flight_recorder=Snapshot(False, (GroupRecord("0", (0, 1), 1, operations[:1]),)))
    greeting = _peer(1)
    first: dict[str, Any] = {"first": _peer(0), "age": 0.5, "speaks": True}
    return {
        HANG: [greeting, place, {"overdue": ["optimizer", 61.0, 60.0], **place}, {"dump": asdict(lags)}],
        LOST: [greeting, {"lost": "a collective failed: reset by peer", **place}, {"dump": asdict(waits)}],
        FAILS: [greeting, place, {"fails": 85}],
        LEAVES: [greeting, place, {"bye": True}],
        ASKS: [first, {"dump": FOLDER}, {"bye": True}],
        ENDS: [first, {"end": 85, "at_once": True, "kill": [_peer(2)]}],
        TELLS: [first, first, {"first_fails": 64}],
    }


def _peer(rank: int) -> dict[str, Any]:
    return {
        "rank": rank, "host": f"n{rank}", "process": 4000 + rank, "start": 99, "space": "here", "section": "step",
        "step": 7,
    }  # fmt: skip


def _write(base: Path) -> None:
    for name, messages in conversations().items():
        (base / "in" / name).write_text("".join(json.dumps(message) + "\n" for message in messages))


def _check(base: Path) -> None:
    """See that each conversation is taken as it is meant: else edits of them would try nothing."""
    said = {name: _speak_to_monitor(base, name, (), _LONG_SECONDS) for name in (HANG, LOST, FAILS, LEAVES)}
    assert 'hangs: rank 1 (process 4001 on n1) has been in "optimizer" for 61 s' in said[HANG], said
    assert "rank 1 (process 4001 on n1) blocks it" in said[HANG], said
    assert "pretrain.py line 7" in said[HANG], said
    assert "a collective failed: reset by peer" in said[LOST], said
    assert "message #3 from rank 0 to rank 1: rank 1 waits for it, rank 0 has not reached it" in said[LOST], said
    assert said[FAILS] == said[LEAVES] == "", said
    assert (base / "out" / "hangs" / FOLDER / "rank_00001.json").exists()
    assert [(base / "out" / name).read_text() for name in (ENDS, TELLS)] == ["85", "64"]


def _step(name: str) -> Callable[[Path], object]:
    return lambda base: _speak_to_watchdog(base, name, (), _LONG_SECONDS)


PREPARE = (_write, _step(ASKS), _step(ENDS), _step(TELLS), _check)
"""Each in a process of its own, which a watchdog may end."""


def program(base: Path, edits: Sequence[Edit]) -> Callable[[], object]:
    """Have the conversation of the first edit."""
    name = edits[0][0]
    wire = [edit[2:] for edit in edits if edit[:2] == [name, "wire"]]
    if name.startswith("monitor"):
        return partial(_speak_to_watchdog, base, name, wire, _SHORT_SECONDS)
    return partial(_report_of_monitor, base, name, wire)


def draw(drawn: random.Random, folder: Path) -> Edit:
    """An edit of a conversation: of its text, its size, or its way."""
    name = drawn.choice(FILES)
    valid = (folder / "in" / name).read_bytes()
    roll, tree = drawn.random(), LINES.decode(valid)
    if roll < 0.25:
        return [name, "wire", *_draw_wire(drawn, len(tree), len(valid))]
    if roll < 0.4:
        path, times = draw_path(drawn, tree), drawn.choice([100, 100, 10_000, 10_000, 1_000_000, 4_000_000])
        if drawn.random() < 0.5:
            return [name, "long text", path, drawn.choice(_BEGINNINGS), drawn.choice(_SWOLLEN_TEXTS), times]
        return [name, "long list", path, drawn.choice(_SWOLLEN_LISTS), times]
    return draw_edit(drawn, name, valid, LINES, regular=True)


def _draw_wire(drawn: random.Random, lines: int, size: int) -> Edit:
    at, other = drawn.randrange(lines), drawn.randrange(lines)
    bytes_there = size + lines * _DIGITS
    return drawn.choice([
        ["again", at], ["swap", at, other], ["leave out", at], ["unsealed", at], ["forge", at], ["number", at, other],
        ["flip", drawn.randrange(8 * bytes_there)], ["own", at], ["cut", drawn.randrange(bytes_there)],
        ["drip", drawn.choice([1, 7, 64])], ["flood", at, drawn.choice([10, 1000, 5000])],
        ["endless", drawn.choice([1, 15, 20])],
        ["garbage", at, drawn.choice(["\0", "\r", "", " ", "{}", "GET /", "\xff"])],
    ])  # fmt: skip


# ------------------------------------------------------------------------------------------------- the end that speaks


class Speaker:
    """An end of a connection that has proved itself, and keeps to nothing else.

    Args:
        role: as whom it speaks, MONITOR or RANK of megalite/watchdog/link.py.
    """

    def __init__(self, connection: socket.socket, role: bytes) -> None:
        self._connection, self.heard = connection, b""
        connection.settimeout(_LONG_SECONDS)
        digits = secrets.token_hex(_DIGITS // 2).encode()
        connection.sendall(digits + b"\n")
        self._read(1)
        theirs = self.heard[:_DIGITS]
        self._key = hmac.digest(SECRET, b" ".join((role, digits, theirs)), "sha256")
        self._sent = 0
        if role == b"monitor":
            self._send(self._sealed([b"{}"])[0])
        self._read(2)  # the monitor's proof, or the rank's word who it is

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._connection.fileno()

    def is_hung_up_on(self) -> bool:
        """Read what has come, and tell whether it was the end."""
        try:
            return not self._connection.recv(1 << 16)
        except OSError:
            return True

    def say(self, lines: Lines, wire: Sequence[Edit], pause: Callable[[], object]) -> None:
        """Send lines; the last one after a pause."""
        lines = list(lines)
        for at, times in (edit[1:] for edit in wire if edit[0] == "flood"):
            lines[at:at] = lines[at : at + 1] * times
        sealed = self._sealed(lines)
        for operation, *arguments in wire:
            with suppress(IndexError):
                self._spoil(sealed, lines, operation, arguments)
        pieces, size = [b"".join(sealed[:-1]), b"".join(sealed[-1:])], sum(map(len, sealed))
        for operation, *arguments in wire:
            if operation == "flip" and arguments[0] < 8 * size:
                data = bytearray(b"".join(pieces))
                data[arguments[0] // 8] ^= 1 << arguments[0] % 8
                pieces = [bytes(data[: len(pieces[0])]), bytes(data[len(pieces[0]) :])]
            elif operation == "cut":
                pieces = [pieces[0][: arguments[0]], pieces[1][: max(arguments[0] - len(pieces[0]), 0)]]
            elif operation == "endless":
                pieces[1] += b"x" * (arguments[0] << 20)
        drip = min((edit[1] for edit in wire if edit[0] == "drip"), default=1 << 20)
        with suppress(OSError):  # it has been hung up on
            self._send(pieces[0], drip)
            pause()
            self._send(pieces[1], drip)

    def _sealed(self, lines: Lines) -> Lines:
        self._sent += len(lines)
        return [self._line(line, self._sent - len(lines) + place) for place, line in enumerate(lines, 1)]

    def _line(self, line: bytes, number: int) -> bytes:
        code = hmac.digest(self._key, b"%d %s" % (number, line), "sha256").hex().encode()
        return code + b" " + line + b"\n"

    def _spoil(self, sealed: Lines, lines: Lines, operation: str, arguments: Sequence[Any]) -> None:
        """Corrupt a line. Raises IndexError if the line does not exist any more."""
        at = arguments[0] if arguments else 0
        if operation == "again":
            sealed.insert(at + 1, sealed[at])
        elif operation == "swap":
            other = arguments[1]
            sealed[at], sealed[other] = sealed[other], sealed[at]
        elif operation == "leave out":
            del sealed[at]
        elif operation == "unsealed":
            sealed[at] = lines[at] + b"\n"
        elif operation == "forge":
            sealed[at] = b"0" * _DIGITS + sealed[at][_DIGITS:]
        elif operation == "number":
            sealed[at] = self._line(lines[at], self._sent + arguments[1])
        elif operation == "own":
            sealed.insert(at, self.heard)
        elif operation == "garbage":
            sealed.insert(at, arguments[1].encode("latin-1") + b"\n")

    def _send(self, data: bytes, size: int = 1 << 20) -> None:
        for at in range(0, len(data), max(size, len(data) // 2000)):
            self._connection.sendall(data[at : at + max(size, len(data) // 2000)])

    def _read(self, lines: int) -> None:
        while self.heard.count(b"\n") < lines:
            data = self._connection.recv(1)
            if not data:
                raise ConnectionError("hung up on at the handshake")
            self.heard += data


# -------------------------------------------------------------------------------------------------- the ends that take


def _report_of_monitor(base: Path, name: str, wire: Sequence[Edit]) -> None:
    """Say what the monitor says."""
    _tell(_speak_to_monitor(base, name, wire, _SHORT_SECONDS))


def _tell(message: str) -> None:
    """Print a message. Raises RuntimeError if it is not readable for a person. One about a hang may be longer: it has a
    line for each of some ranks."""
    sys.stderr.write(message)
    if message.count("\n") > _MOST_LINES or not all(
        line.isprintable() and len(line) <= _MOST_CHARACTERS for line in message.split("\n")
    ):
        raise RuntimeError("a message of many lines, of a long one, or of what cannot be printed")


def _speak_to_monitor(base: Path, name: str, wire: Sequence[Edit], patience: float) -> str:
    """Be rank 1, beside a proper rank 0. Returns what the monitor reports. Raises RuntimeError where it does not answer
    a proper rank afterwards. `patience`: seconds for what comes unless edits have spoiled it."""
    from megalite.process.place import Place
    from megalite.watchdog import monitor as monitor_file
    from megalite.watchdog.hang_dump import RankDump
    from megalite.watchdog.link import Peer, connect
    from megalite.watchdog.secret import Secret
    from megalite.watchdog.sections import Limits
    from megalite.watchdog.snapshot import GroupRecord, Operation, Snapshot

    _set(monitor_file, ANSWER_SECONDS=patience, _TOGETHER_SECONDS=0.0, _TICK_SECONDS=0.005)
    said: list[str] = []

    def say(message: str, code: int) -> int:
        said.append(message)
        return code

    def proper(rank: int) -> Link:
        link = connect(*monitor.address, SECRET, _LONG_SECONDS)
        link.send(**_peer(rank))
        if not _hears(link, {"first"}, _LONG_SECONDS):
            raise RuntimeError(f"the monitor does not answer rank {rank}, which is a proper one")
        return link

    place = Place(0, 0, 4, host="127.0.0.1")
    monitor = monitor_file.Monitor(Peer.of(_peer(0)), place, Secret(SECRET), Limits(), say, base / "out")
    monitor.start()
    rank_0 = proper(0)

    def answer() -> None:
        if name in (HANG, LOST) and "dump" in _hears(rank_0, {"dump", "end"}, patience, speaker):
            operations = tuple(Operation(n, "all_reduce", ((4, 2),), "float32", "started", 1.5) for n in (1, 2))
            records = (GroupRecord("0", (0, 1), 2, operations),)
            waits = RankDump(0, 3, "n0", 4000, "data", 61.0, flight_recorder=Snapshot(True, records))
            rank_0.send(dump=asdict(waits if name == HANG else replace(waits, flight_recorder=Snapshot(False, ()))))
            asked.set()

    asked = threading.Event()
    with socket.create_connection(monitor.address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        speaker = Speaker(connection, b"rank")
        speaker.say((base / "in" / name).read_bytes().splitlines(), wire, answer)
        if asked.is_set():
            _hears(rank_0, {"end"}, patience, speaker)
    _await_reading(monitor)
    another = proper(max({2, 3} - monitor._ranks.keys()))
    monitor.close()
    another.close()
    if len(said) > 1:
        raise RuntimeError("the monitor says twice why the run ends")
    return "".join(said)


def _await_reading(monitor: Monitor) -> None:
    """Wait until the monitor has read the end of rank 1's connection, if it has taken it for one."""
    deadline = time.monotonic() + _SHORT_SECONDS
    while time.monotonic() < deadline and 1 in monitor._ranks and not (monitor._verdict or monitor._lost):
        time.sleep(0.002)


def _speak_to_watchdog(base: Path, name: str, wire: Sequence[Edit], patience: float) -> None:
    """Be the monitor of a real rank 1. Raises RuntimeError where its watchdog neither ends it nor lets it go on."""
    from megalite.mailbox import Mailbox
    from megalite.process.place import Place
    from megalite.torch_internals import HashStore
    from megalite.watchdog import watchdog as watchdog_file
    from megalite.watchdog.sections import Limits, Sections

    _set(watchdog_file, _TICK_SECONDS=0.01, _LEAVING_SECONDS=0.0, _LINKING_SECONDS=patience)
    end_at_once, linked, server = os._exit, threading.Event(), socket.create_server(("127.0.0.1", 0))

    def ended(code: int) -> None:
        """The system takes the last eight bits of any number for the exit code, and 256 for that of a good end."""
        (base / "out" / name).write_text(str(code))
        if code not in range(256):
            sys.stderr.write(f"error: ends with {code!r}, which is no exit code\n")
        end_at_once(0 if code in range(256) else 70)

    def report(_: object, message: str, code: int) -> int:
        try:
            _tell(message)
        except RuntimeError:
            traceback.print_exc()
        return code

    def speak() -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            lines = (base / "in" / name).read_bytes().splitlines()
            Speaker(connection, b"monitor").say(lines, wire, lambda: linked.wait(patience))

    os.environ["MEGALITE_SECRET"] = SECRET.decode()
    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    mailbox = Mailbox(HashStore(), 3)
    mailbox.put("megalite/watchdog", f"{server.getsockname()[1]} ")  # as rank 0 publishes it
    watchdog = watchdog_file.Watchdog(
        Sections(), Limits(), report, Place(1, 0, 3), mailbox=mailbox, folder=base / "out" / "hangs"
    )
    os._exit = ended  # type: ignore[assignment]
    try:
        with watchdog:
            linked.set()
            if watchdog.linked:  # it ends this process, or leaves
                watchdog._thread.join(_LONG_SECONDS)
                if watchdog._thread.is_alive() or not watchdog._leaving:
                    raise RuntimeError("the watchdog's thread has ended, or goes on though rank 0 has gone")
    finally:
        os._exit = end_at_once


def _hears(link: Link, keys: set[str], seconds: float, speaker: Speaker | None = None) -> set[str]:
    """The keys of the first message that has one of these; nothing where none comes, or the speaker is hung up on."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([link, speaker] if speaker else [link], [], [], left)
        if link in ready:
            for message in link.receive():
                if keys & message.keys():
                    return set(message)
        elif ready and speaker is not None and speaker.is_hung_up_on():
            break
    return set()


def _set(module: ModuleType, **values: float) -> None:
    """Make a module's waits short, in this process, which is an input's own."""
    for name, value in values.items():
        assert hasattr(module, name), name
        setattr(module, name, value)

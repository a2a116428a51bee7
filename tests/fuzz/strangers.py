"""Strangers who speak to the watchdog's monitor of a real run, with all that the run's open store tells them.

The run has two ranks and goes on; so it must when the strangers have left: nobody killed, no traceback, no thread or
memory lost. A process beside the run, which does nothing, is what a stranger may name as a rank's.
"""

from __future__ import annotations

import hmac
import os
import random
import secrets
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fuzz import child
from tests.fuzz.child import MEMORY, Outcome
from tests.fuzz.edits import Edit
from tests.fuzz.programs import MOCK, SIZES, command

RANKS = 2
STRANGERS = 30
"""Largest number of strangers in an input: starting a run takes longer than sending their messages."""
HOLD_SECONDS = 7.0
"""More than a rank has for its answer (5 s)."""
START_SECONDS = 20.0
_HEARING_SECONDS = 0.3
"""Time to wait for a reply of the monitor to a stranger."""


class Strangers:
    """Runs inputs in a folder.

    Args:
        base: the folder, with the folders of `child.make_folders`.
    """

    def __init__(self, base: Path) -> None:
        self._base = base

    @staticmethod
    def draw(draw: random.Random) -> list[Edit]:
        """An input: what each of some strangers does, one after the other."""
        return [["stranger", *_draw_acts(draw)] for _ in range(draw.choice([1, 3, STRANGERS]))]

    def run(self, edits: Sequence[Edit]) -> Outcome:
        """Start a run, send it what strangers say, and look whether it goes on and ends when it is told to."""
        begin, port = time.monotonic(), _free_port()
        stretched = child.time_limit() / child.SECONDS
        canary = child.start(lambda: time.sleep(3600), self._base, name="canary")
        ranks = [self._start_rank(rank, port) for rank in range(RANKS)]
        fault, strangers = None, 0
        if self._await_steps(ranks, START_SECONDS * stretched):
            strangers = child.start(lambda: _speak(edits, port, canary), self._base, name="strangers")
            fault = self._watch(ranks, canary, HOLD_SECONDS * 2 * stretched, strangers)
        else:
            fault = "the run did not start"
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGTERM)
        codes = [_end(rank, child.time_limit()) for rank in ranks]
        if fault is None and not set(codes) <= {0, 85}:
            fault = f"the run ended with {codes} when it was asked to stop"
        _end(canary, 0.0)
        if strangers and _end(strangers, 0.0) == 1 and fault is None:
            fault = "the monitor answers no stranger's digits, so that nothing was tried"
        said = "".join((self._base / f"rank{rank}.stderr").read_text(errors="replace") for rank in range(RANKS))
        judged, place = child.judge(0, said.encode(), b"")
        if judged:
            fault = judged
        return Outcome(fault, place, codes[0], said[-3000:], time.monotonic() - begin)

    def _start_rank(self, rank: int, port: int) -> int:
        flags = ("--train-iters", 10**6, "--watchdog-min-seconds", 5, "--save", self._base / "out" / "run")
        layout = ("--tensor-model-parallel-size", RANKS, "--save-interval", 10**6)
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        return child.start(
            lambda: command("pretrain_gpt.py", *SIZES, *MOCK, *flags, *layout), self._base, environment, f"rank{rank}"
        )

    def _await_steps(self, ranks: Sequence[int], seconds: float) -> bool:
        deadline, metrics = time.monotonic() + seconds, self._base / "out" / "run" / "metrics.jsonl"
        while time.monotonic() < deadline:
            if metrics.exists() and metrics.stat().st_size:
                return True
            if any(map(_has_ended, ranks)):
                return False
            time.sleep(0.02)
        return False

    def _watch(self, ranks: Sequence[int], canary: int, seconds: float, strangers: int) -> str | None:
        """Watch the run while strangers send; returns the problem, or None."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not _has_ended(strangers):
            if _has_ended(canary):
                return "a stranger had a process killed that is none of the run"
            if any(map(_has_ended, ranks)):
                return "a stranger ended the run"
            if child.usage(ranks[0])[2] > MEMORY:
                return "a stranger filled the memory"
            time.sleep(0.02)
        return None


def _draw_acts(draw: random.Random) -> list[Edit]:
    """Draw the actions of a stranger on a connection. Most start with digits, without which nothing else is read."""
    if draw.random() < 0.35:  # it speaks another protocol: lines without codes, the first with what the store told it
        if draw.random() < 0.5:
            return [["line", draw.choice(_GARBAGE)]]
        lines = [draw.choice(_GREETINGS), *(draw.choice(_MESSAGES) for _ in range(draw.choice([1, 2, 3])))]
        return [["guess", "no code", line] for line in lines]
    acts: list[Edit] = [["digits"]] if draw.random() < 0.85 else []
    for _ in range(draw.choice([0, 1, 1, 2, 5])):
        acts.append(draw.choice([
            ["guess", draw.choice(_GUESSES), draw.choice(_MESSAGES)],
            ["guess", draw.choice(_GUESSES), draw.choice(_MESSAGES)],
            ["line", draw.choice(_GARBAGE)],
            ["echo"], ["replay"], ["digits"], ["cut", draw.choice(_MESSAGES)],
            ["drip", draw.choice(_MESSAGES)], ["flood", draw.choice([10, 100, 300])],
            ["endless", draw.choice([1, 1000, 100_000])],
        ]))  # fmt: skip
    return acts


_GUESSES = ("no code", "zeros", "nothing", "the store's", "the digits")
"""Guesses of a stranger for the secret, or in the place of a code."""
_MESSAGES = (
    '{"rank": 1, "host": "host", "process": {canary}, "start": 1, "space": "{space}", "section": "step", "step": 1}',
    '{"rank": 0, "host": "host", "process": {canary}, "start": 1, "space": "{space}", "section": "step", "step": 1}',
    '{"overdue": ["step", 99.0, 9.0], "section": "step", "step": 1}',
    '{"lost": "all"}',
    '{"fails": 70}',
    '{"bye": true}',
    '{"end": 0, "at_once": true, "kill": [{"rank": 1, "process": {canary}}]}',
    "{}",
)
_GREETINGS = (
    '{"token": "{told}", "rank": 1, "host": "host", "process": {canary}, "space": "{space}"}',
    '{"token": "{told}", "rank": 0, "host": "host", "process": {canary}, "space": "{space}"}',
    '{"token": "{told}"}',
)
_GARBAGE = (
    "[" * 100_000, "{", "null", '"x"', "\xff\xfe\x00", "", " ", "1" * 5000, "0" * 64, "0" * 63 + "g", "A" * 64,
    "0" * 64 + " {}", "0" * 64 + " ", " {}", "\xe9" * 64 + " {}", "GET / HTTP/1.1\r\n\r", "\x16\x03\x01", "\n" * 10_000,
    '{"token": "\\ud800"}', '{"token": "\\udfff"}', '{"token": 1, "rank": []}',
)  # fmt: skip


class _Stranger:
    """A connection to the monitor.

    Args:
        told: what the store says to anybody.
        names: what `{canary}`, `{space}` and `{told}` stand for in a message.
        overheard: what the monitor has said to strangers so far.
    """

    def __init__(self, port: int, told: str, names: Mapping[str, str], overheard: list[bytes]) -> None:
        self.connections = [_connect(port)]
        self._port, self._told, self._names, self._overheard = port, told, names, overheard
        self._digits, self._heard, self._lines = b"", b"", 0

    def act(self, what: str, *arguments: Any) -> None:
        """Perform an action. Raises OSError if the monitor has closed the connection."""
        send = self.connections[0].sendall
        if what == "digits":
            self._digits = secrets.token_hex(32).encode()
            send(self._digits + b"\n")
            self._listen()
        elif what == "guess":
            send(self._sealed(*arguments))
        elif what == "line":
            send(arguments[0].encode("latin-1") + b"\n")
        elif what == "echo":
            self._listen()
            send(self._heard)
        elif what == "replay":
            send(b"".join(self._overheard))
        elif what == "cut":
            send(self._sealed("zeros", *arguments)[:-5])
            self.connections[0].shutdown(socket.SHUT_WR)
        elif what == "drip":
            for byte in self._sealed("zeros", *arguments):
                send(bytes([byte]))
                time.sleep(0.002)
        elif what == "flood":
            self.connections += [_connect(self._port) for _ in range(arguments[0])]
        elif what == "endless":
            send(b"x" * arguments[0])

    def is_answered(self) -> bool:
        """Tell whether the other end accepts digits, and then proves to be a monitor."""
        self.act("digits")
        return self._heard.endswith(b" {}\n")

    def _listen(self) -> None:
        """Hear the monitor's digits and its proof, as far as they come within a moment."""
        with suppress(TimeoutError):
            while not self._heard.endswith(b" {}\n") and (data := self.connections[0].recv(65536)):
                self._heard += data
                self._overheard.append(data)

    def _sealed(self, guess: str, message: str) -> bytes:
        for name, value in self._names.items():
            message = message.replace(name, value)
        line, self._lines = message.encode(), self._lines + 1
        keys = {"nothing": b"", "the store's": self._told.encode(), "the digits": self._digits}
        code = b"0" * 64
        if guess in keys:
            key = hmac.digest(keys[guess], b" ".join((b"rank", self._digits, self._heard[:64])), "sha256")
            code = hmac.digest(key, b"%d %s" % (self._lines, line), "sha256").hex().encode()
        return (b"" if guess == "no code" else code + b" ") + line + b"\n"


def _connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=1.0)
    connection.settimeout(_HEARING_SECONDS)
    return connection


def _speak(edits: Sequence[Edit], store_port: int, canary: int) -> None:
    """Be the strangers, and stay for a while. Ends with 1 if the monitor has not answered the first of them."""
    port, told = _told_by_the_store(store_port)
    space = f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"  # as for any process of the machine
    names, overheard = {"{canary}": str(canary), "{space}": space, "{told}": told}, list[bytes]()
    deadline = time.monotonic() + HOLD_SECONDS
    strangers = [_Stranger(port, told, names, overheard)]
    answered = False
    with suppress(OSError):
        answered = strangers[0].is_answered()  # the others speak all the same: to another protocol, too
    for _, *acts in edits:
        with suppress(OSError):
            strangers.append(_Stranger(port, told, names, overheard))
            for act in acts:
                if time.monotonic() < deadline:
                    strangers[-1].act(*act)
    time.sleep(max(deadline - time.monotonic(), 0.0))
    if not answered:
        raise SystemExit(1)


def _told_by_the_store(port: int) -> tuple[int, str]:
    """The monitor's port, and what else the store of a run says of it to whoever asks."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
    (address,) = (store.get(key).decode() for key in store.list_keys() if "watchdog" in key)
    found, _, told = address.partition(" ")
    return int(found), told


def _has_ended(process: int) -> bool:
    """Tell whether a child has ended, without reaping it."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process: int, seconds: float) -> int | None:
    """The exit code of a child, or None where it had to be killed after so many seconds."""
    deadline = time.monotonic() + seconds
    while not _has_ended(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    late = not _has_ended(process)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return None if late else os.waitstatus_to_exitcode(status)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port

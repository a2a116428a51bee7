"""Strangers who send lines to the watchdog of a real run, with all that the run's open store tells them.

The run has two ranks and goes on; so it must when the strangers have left: nobody killed, no traceback, no thread or
memory lost. A process beside the run, which does nothing, is what a stranger may name as a rank's.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fuzz import child
from tests.fuzz.child import MEMORY, Outcome
from tests.fuzz.edits import Edit
from tests.fuzz.programs import MOCK, SIZES, command

RANKS = 2
STRANGERS = 30
"""Of an input at most: starting a run takes longer than sending what they say."""
HOLD_SECONDS = 7.0
"""More than a rank has for its answer (5 s)."""
START_SECONDS = 20.0
_GREETING = {
    "token": "{token}", "rank": 1, "host": "host", "space": "{space}", "process": "{canary}", "section": "step",
    "step": 1,
}  # fmt: skip
"""Of a rank, with the number of another process."""


class Strangers:
    """Runs inputs in a folder.

    Args:
        base: the folder, with the folders of `child.make_folders`.
    """

    def __init__(self, base: Path) -> None:
        self._base = base

    @staticmethod
    def draw(draw: random.Random) -> list[Edit]:
        """An input: what each of some strangers says, a few who keep to the protocol or many who do not."""
        if draw.random() < 0.5:
            greeting = json.dumps(_GREETING)
            return [["stranger", greeting, draw.choice(_MESSAGES)] for _ in range(draw.choice([1, 1, 2]))]
        return [["stranger", *_draw_lines(draw)] for _ in range(draw.choice([3, STRANGERS]))]

    def run(self, edits: Sequence[Edit]) -> Outcome:
        """Start a run, send it what strangers say, and look whether it goes on and ends when it is told to."""
        begin, port = time.monotonic(), _free_port()
        stretched = child.time_limit() / child.SECONDS
        canary = child.start(lambda: time.sleep(3600), self._base, name="canary")
        ranks = [self._start_rank(rank, port) for rank in range(RANKS)]
        fault, strangers = None, 0
        if self._await_steps(ranks, START_SECONDS * stretched):
            strangers = child.start(lambda: _speak(edits, port, ranks[0], canary), self._base, name="strangers")
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
            fault = "no stranger reached the run, so that nothing was tried"
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
        """What goes wrong while strangers speak."""
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


def _draw_lines(draw: random.Random) -> list[str]:
    lines = []
    if draw.random() < 0.85:
        greeting: dict[str, Any] = _GREETING | {"rank": draw.choice([0, 1, 1, 1, 2])}
        for _ in range(draw.choice([0, 0, 1, 2])):
            key = draw.choice(list(greeting))
            greeting[key] = draw.choice(_VALUES)
        lines.append(json.dumps(greeting))
    for _ in range(draw.choice([0, 1, 1, 2, 5])):
        roll = draw.random()
        if roll < 0.45:
            lines.append(draw.choice(_MESSAGES))
        elif roll < 0.7:
            lines.append(json.dumps({draw.choice(_KEYS): draw.choice(_VALUES) for _ in range(draw.choice([1, 2]))}))
        else:
            lines.append(draw.choice(_GARBAGE))
    return lines


_KEYS = ("token", "rank", "process", "section", "step", "dump", "fails", "bye", "overdue", "lost", "first", "end",
         "kill", "nonce", "proof", "hello", "challenge", "answer", "age")  # fmt: skip
_VALUES: tuple[Any, ...] = (
    "\ud800", "", "x", None, True, -1, 0, 1, 2**31, 10**30, 1e308, float("nan"), [], {}, [[]], "{canary}", "{token}",
    ["step", 99.0, 9.0], {"end": 0}, "a" * 10_000, [0] * 1000,
)  # fmt: skip
_MESSAGES = (
    '{"overdue": ["step", 99.0, 9.0]}',
    '{"overdue": ["step", 99.0, 9.0], "section": "step", "step": 1}',
    '{"lost": 0}',
    '{"fails": 70}',
    '{"bye": true}',
    '{"dump": {}}',
    '{"section": "step"}',
    '{"end": 0, "at_once": true, "kill": ["{canary}"]}',
    "{echo}",
)
_GARBAGE = (
    "[" * 100_000, "{", "null", "[]", '"x"', "\xff\xfe\x00", "", " ", "1" * 5000, '{"token": "\\ud800"}',
    '{"a":' * 5000,
    "a" * 2_000_000, "GET / HTTP/1.1\r\n\r", '{"token": 1e999}', "\x16\x03\x01", '{"a": 1, "a": 2}', "\n" * 10_000,
)  # fmt: skip


def _speak(edits: Sequence[Edit], store_port: int, rank: int, canary: int) -> None:
    """Say everything on one connection each, to each port that the rank listens on, and stay for a while."""
    secrets = _told_by_the_store(store_port)
    listening = [each for each in _listening(rank) if each[1] != store_port]
    words = [word for value in secrets for word in value.split()]
    tokens = [word for word in words if not word.isdecimal()] or ["x"]
    space = f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"  # as for any process of the machine
    deadline = time.monotonic() + HOLD_SECONDS
    connections = []
    for _, *lines in edits:
        for address in listening:
            with suppress(OSError):
                connection = socket.create_connection(address, timeout=1.0)
                connections.append(connection)
                heard = b""
                for line in lines:
                    if line == "{echo}":
                        heard = connection.recv(65536)
                        connection.sendall(heard)
                        continue
                    for token in tokens[:1]:
                        said = line.replace('"{canary}"', str(canary)).replace("{token}", token)
                        connection.sendall(said.replace("{space}", space).encode("latin-1", "replace") + b"\n")
    if not connections:
        raise SystemExit(1)
    while time.monotonic() < deadline:
        time.sleep(0.05)


def _told_by_the_store(port: int) -> list[str]:
    """What stands in the store of a run, for whoever asks."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    found = []
    with suppress(RuntimeError, ValueError):
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
        for key in store.list_keys():
            with suppress(RuntimeError, UnicodeDecodeError):
                if "watchdog" in key:
                    found.append(store.get(key).decode())
    return found


def _listening(process: int) -> list[tuple[str, int]]:
    """The TCP addresses and ports that a process listens on."""
    sockets = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(file))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                address, _, port = fields[1].partition(":")
                found.add((_address(address), int(port, 16)))
    return sorted(found)


def _address(text: str) -> str:
    """An address as proc_pid_net(5) has it: words of this machine's order of bytes; any of them is the loopback's."""
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    raw = b"".join(words)
    if not any(raw):
        return "127.0.0.1"
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def _has_ended(process: int) -> bool:
    """Whether a child has ended; it is left to be waited for."""
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

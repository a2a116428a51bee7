"""The monitor, a thread of rank 0: it knows by a connection to each rank whether that rank lives, and says who is gone.

When a process is killed the system closes its connections at once: so the monitor hears within milliseconds of a rank
that dies, also where the others wait for it on a GPU and notice nothing. When a rank is late with a section, or has
lost another one, the monitor asks all ranks what they are in, and concludes from the answers, and from who gives none,
which rank is missing and where. Then it says so, once, and has all ranks end.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite.errors import EXIT_RESUMABLE
from megalite.watchdog.hang_dump import RankDump
from megalite.watchdog.link import Link, LinkLost, Message, listen
from megalite.watchdog.sections import MEETING
from megalite.watchdog.verdict import Peer, death, folder_name, hang

Say = Callable[[str, int], int]
"""Say an error and leave its exit code, unless a rank has said one; returns the code of what was said."""

ANSWER_SECONDS = 5.0  # to say what one is in, and to write it to a shared file system
_TOGETHER_SECONDS = 0.3  # ranks that die of one cause go within this time
_GREETING_SECONDS = 60.0
_TICK_SECONDS = 0.1
_PING_SECONDS = 1.0


@dataclass(eq=False)
class _Connected:
    """A rank's connection, and what came over it."""

    link: Link
    peer: Peer | None = None
    """None until it has said who it is."""
    heard: float = 0.0
    placed: float = 0.0
    """When it was last heard where in the run it is, or earlier: it came since then."""
    fails: int | None = None
    """The exit code that it is about to end with, having said why."""
    dump: RankDump | None = None


@dataclass
class _Alarm:
    """Why the monitor asks all ranks what they are in."""

    since: float
    rank: int
    why: Message
    name: str
    """Of the folder that the answers are written to."""
    asked: bool = False


class Monitor(threading.Thread):
    """Watches the ranks from rank 0. `address` is for the store: a port and a token."""

    def __init__(self, first: Peer, world_size: int, say: Say, folder: Path | None) -> None:
        """`first` is rank 0 itself; `folder`: where the ranks write what they are in."""
        super().__init__(name="monitor", daemon=True)
        self._first, self._say, self._folder = first, say, folder
        self._token = secrets.token_hex(16)
        self._listener = listen()
        self.address = f"{self._listener.getsockname()[1]} {self._token}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ranks: dict[int, _Connected] = {}
        self._speakers: dict[str, _Connected] = {}
        """By node."""
        self._missing = set(range(world_size))
        """Ranks that have never connected."""
        self._lost: dict[int, float] = {}
        self._alarm: _Alarm | None = None
        self._first_failed = self._closing = False
        self._verdict: Message | None = None
        """The message to all ranks, once it is concluded why the run ends."""
        self._began = self._pinged = self._looked = time.monotonic()
        self._greeted = False

    def run(self) -> None:
        """Until `close`."""
        while not self._closing:
            looks = time.monotonic()
            for key, _ in self._selector.select(_TICK_SECONDS):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
            self._looked = looks  # what is read next has come since then
            self._tick(time.monotonic())
        for connected in self._ranks.values():
            connected.link.send(bye=True)
            connected.link.close()
        self._listener.close()
        self._selector.close()

    def close(self) -> None:
        """Take leave of all ranks: the run ends well."""
        self._closing = True
        self.join()

    def settle(self) -> None:
        """For rank 0, which ends by an error: wait until all know of that, and until what has happened is told."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and not (self._first_failed and (self._verdict or not self._lost)):
            time.sleep(_TICK_SECONDS / 10)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again, or this process has too many files open: whoever is left out is told of
            return
        connected = _Connected(Link(connection))
        self._selector.register(connected.link, selectors.EVENT_READ, connected)

    def _read(self, connected: _Connected) -> None:
        try:
            for message in connected.link.receive():
                self._take(connected, message)
        except LinkLost:
            self._forget(connected)
            if connected.peer is not None:
                self._lost[connected.peer.rank] = time.monotonic()

    def _forget(self, connected: _Connected) -> None:
        self._selector.unregister(connected.link)
        connected.link.close()

    def _take(self, connected: _Connected, message: Message) -> None:
        if connected.peer is None:
            self._greet(connected, message)
            return
        rank, connected.heard = connected.peer.rank, time.monotonic()
        if "section" in message:
            connected.peer.section, connected.peer.step = message["section"], message["step"]
            connected.placed = self._looked
        if "fails" in message:
            connected.fails = message["fails"]
            if rank == 0:  # which may take this monitor with it before any rank can ask
                self._tell_all(first_fails=connected.fails)
                self._first_failed = True
        elif "dump" in message:
            connected.dump = RankDump.of(message["dump"])
        elif "bye" in message:
            self._forget(connected)
            del self._ranks[rank]
            if self._alarm is not None and self._alarm.rank == rank:  # it went on after all
                self._alarm = None
        elif ("overdue" in message or "lost" in message) and self._alarm is None:
            self._alarm = _Alarm(time.monotonic(), rank, message, folder_name())

    def _greet(self, connected: _Connected, message: Message) -> None:
        if not hmac.compare_digest(str(message.get("token")).encode(), self._token.encode()):
            raise LinkLost
        connected.peer = Peer(**{name: value for name, value in message.items() if name != "token"})
        connected.heard, connected.placed = time.monotonic(), self._looked
        self._ranks[connected.peer.rank] = connected
        self._missing.discard(connected.peer.rank)
        displaced = self._choose_speakers([connected])
        self._tell_of_first([connected, *displaced])
        if self._verdict is not None:
            connected.link.send(**self._verdict)

    def _choose_speakers(self, among: Iterable[_Connected]) -> list[_Connected]:
        """Have the lowest of the ranks on each node, rank 0 not counted, speak when rank 0 is lost. Returns those that
        are not to any more."""
        displaced = []
        for connected in among:
            if connected.peer is not None and connected.peer.rank:
                chosen = self._speakers.setdefault(connected.peer.space, connected)
                if chosen.peer is not None and connected.peer.rank < chosen.peer.rank:
                    self._speakers[connected.peer.space] = connected
                    displaced.append(chosen)
        return displaced

    def _tell_of_first(self, to: Iterable[_Connected]) -> None:
        """Rank 0, where it is, and whether one is to speak when it is lost."""
        own = self._ranks.get(0)
        first, placed = (self._first, self._began) if own is None or own.peer is None else (own.peer, own.placed)
        age = time.monotonic() - placed
        speakers = set(self._speakers.values())
        for connected in to:
            connected.link.send(first=asdict(first), age=age, speaks=connected in speakers)

    def _tell_all(self, **message: Any) -> None:
        for connected in self._ranks.values():
            connected.link.send(**message)

    # ------------------------------------------------------------------------------------------------ conclusions

    def _tick(self, now: float) -> None:
        if now - self._pinged > _PING_SECONDS:
            self._pinged = now
            self._speakers.clear()  # some may have left
            self._choose_speakers(self._ranks.values())
            self._tell_of_first(self._ranks.values())
        first = self._ranks.get(0)
        if first is not None and first.peer is not None and first.peer.section == MEETING:
            self._began = now  # those that are yet to come are not missed
        if not self._greeted and now - self._began > _GREETING_SECONDS:
            self._greeted = True
            self._tell_of_strangers()
        if self._verdict is not None:
            return
        if self._lost and now - min(self._lost.values()) > _TOGETHER_SECONDS:
            self._conclude_death()
        elif self._alarm is not None and not self._lost:
            self._look_into(self._alarm, now)

    def _look_into(self, alarm: _Alarm, now: float) -> None:
        if not alarm.asked:
            if now - alarm.since > _TOGETHER_SECONDS:  # else a rank may yet be heard to have died, and that is all
                alarm.asked = True
                for connected in self._ranks.values():
                    connected.dump = None  # it may have answered to an alarm that was taken back
                self._tell_all(dump=alarm.name)
            return
        unanswered = [rank for rank, connected in self._ranks.items() if connected.dump is None]
        if not unanswered or now - alarm.since > _TOGETHER_SECONDS + ANSWER_SECONDS:
            self._conclude_hang(alarm, set(unanswered), now)

    def _tell_of_strangers(self) -> None:
        if self._missing:
            port = self.address.split()[0]
            sys.stderr.write(
                f"warning: rank 0's watchdog, on port {port} of its machine, has not been reached by ranks "
                f"{sorted(self._missing)}: "
                "where one of them dies the others may not hear of it. Let the ports between nodes be open\n"
            )

    def _conclude_death(self) -> None:
        lost = [self._ranks[rank] for rank in sorted(self._lost)]
        failed = [connected.fails for connected in lost if connected.fails is not None]
        silent = [
            (connected.peer, self._lost[connected.peer.rank] - connected.placed)
            for connected in lost
            if connected.fails is None and connected.peer is not None
        ]
        if silent and set(failed) <= {EXIT_RESUMABLE}:  # a launcher ends the others when one has died
            code = self._say(death(silent), EXIT_RESUMABLE)
        else:  # the rank says why by itself, or a rank that failed of the same
            code = max(failed, key=lambda code: code != EXIT_RESUMABLE)
        self._end(code, at_once=False)

    def _conclude_hang(self, alarm: _Alarm, silent: set[int], now: float) -> None:
        ranks = self._ranks
        dumps = {rank: connected.dump for rank, connected in ranks.items() if connected.dump is not None}
        peers = {rank: connected.peer for rank, connected in ranks.items() if connected.peer is not None}
        silence = {rank: now - ranks[rank].heard for rank in silent}
        folder = None if self._folder is None else self._folder / alarm.name
        message = hang(alarm.rank, alarm.why, peers, dumps, silence, folder, sorted(self._missing))
        code = self._say(message, EXIT_RESUMABLE)
        self._end(code, at_once=True, kill=self._executioners(silent, peers))

    def _executioners(self, silent: set[int], peers: Mapping[int, Peer]) -> dict[int, list[int]]:
        """For a process that does not answer, a rank that can kill it: else it would stay, stopped, and keep its
        launcher waiting."""
        found: dict[int, list[int]] = {}
        for rank in silent:
            near = [other for other, peer in peers.items() if other not in silent and peer.space == peers[rank].space]
            if near:
                found.setdefault(min(near), []).append(peers[rank].process)
        return found

    def _end(self, code: int, *, at_once: bool, kill: Mapping[int, list[int]] | None = None) -> None:
        self._verdict = {"end": code, "at_once": at_once, "kill": []}
        for rank, connected in self._ranks.items():
            connected.link.send(**self._verdict | {"kill": (kill or {}).get(rank, [])})


def connect(address: str, host: str, own: Peer) -> Link:
    """Connect to the monitor at an address from the store, and say who one is. Raises OSError where that fails."""
    port, token = address.split()
    link = Link(socket.create_connection((host, int(port)), timeout=30.0))
    link.send(token=token, **asdict(own))
    return link

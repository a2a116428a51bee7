"""Monitor, a thread of rank 0: its connection to each rank shows whether that rank lives, and it reports which has
gone.

When a process is killed, the system closes its connections at once. So the monitor hears within milliseconds of a rank
that dies, even if the others wait for it on a GPU and notice nothing. When a rank is late with a section, or has lost
another rank, the monitor asks all ranks which section they are in. From the answers, and from the ranks that do not
answer, it concludes which rank is missing and where. Then it reports this, once, and has all ranks end.
"""

from __future__ import annotations

import selectors
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite.errors import EXIT_RESUMABLE
from megalite.process.host import listen
from megalite.process.place import ranks_text
from megalite.watchdog.hang_dump import RankDump
from megalite.watchdog.link import MONITOR, Link, LinkLost, Message
from megalite.watchdog.secret import VARIABLE, Secret
from megalite.watchdog.sections import MEETING
from megalite.watchdog.verdict import Peer, alarm_of, death, exit_code, folder_name, hang, whole, words

Say = Callable[[str, int], int]
"""Function that reports an error and leaves its exit code, unless a rank has reported one; returns the reported
code."""

ANSWER_SECONDS = 5.0  # to say what one is in, and to write it to a shared file system
_TOGETHER_SECONDS = 0.3  # ranks that die of one cause go within this time
_COMING_SECONDS = 60.0  # for all ranks, once they have met; who is not there then is told of
_GREETING_SECONDS = 10.0  # for who connects, to prove to be a rank
_MOST_STRANGERS = 64  # that may be connected at a time, beside the ranks that are yet to come
_TICK_SECONDS = 0.1
_PING_SECONDS = 1.0


@dataclass(eq=False)
class _Connected:
    """Connection of a rank, and what came over it."""

    link: Link
    peer: Peer | None = None
    """Identity of the rank; None until it has sent it."""
    heard: float = 0.0
    placed: float = 0.0
    """Time when its place in the run was last known, or earlier; it may have moved on since."""
    fails: int | None = None
    """Exit code that it is about to end with, having said why."""
    dump: RankDump | None = None


@dataclass
class _Alarm:
    """Reason that the monitor asks all ranks which section they are in."""

    since: float
    rank: int
    why: Message
    name: str
    """Name of the folder that the answers are written to."""
    asked: bool = False


class Monitor(threading.Thread):
    """Monitor of all ranks, on rank 0. `address`: where it listens."""

    def __init__(self, first: Peer, world_size: int, secret: Secret, say: Say, folder: Path | None) -> None:
        """Set up; `first` is rank 0 itself; `folder`: where the ranks write their dumps."""
        super().__init__(name="monitor", daemon=True)
        self.secret = secret
        self._first, self._say, self._folder = first, say, folder
        self._listener = listen("rank 0's watchdog")
        host, port, *_ = self._listener.getsockname()
        self.address: tuple[str, int] = (host, port)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers: list[_Connected] = []
        """Connections that have not sent their identity, the oldest first."""
        self._ranks: dict[int, _Connected] = {}
        self._speakers: dict[str, _Connected] = {}
        """Speakers by node: the ranks that report when rank 0 is lost."""
        self._world = range(world_size)
        self._missing = set(self._world)
        """Ranks that have never connected."""
        self._lost: dict[int, float] = {}
        self._alarm: _Alarm | None = None
        self._first_failed = self._closing = False
        self._verdict: Message | None = None
        """Message to all ranks, once the reason that the run ends is known."""
        self._began = self._pinged = self._looked = time.monotonic()
        self._told_of_missing = False

    def run(self) -> None:
        """Run until `close`."""
        while not self._closing:
            looks = time.monotonic()
            for key, _ in self._selector.select(_TICK_SECONDS):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
            self._looked = looks  # what is read next has come since then
            try:
                self._tick(time.monotonic())
            except Exception:  # a defect, in the conclusions: there was something to conclude
                traceback.print_exc()
                self._end(EXIT_RESUMABLE, at_once=True)
        for connected in self._ranks.values():
            connected.link.send(bye=True)
            connected.link.close()
        for stranger in self._strangers:
            stranger.link.close()
        self._listener.close()
        self._selector.close()
        self.secret.remove()

    def close(self) -> None:
        """Say goodbye to all ranks: the run ends well."""
        self._closing = True
        self.join()

    def settle(self) -> None:
        """Wait, on rank 0 when it ends by an error, until all ranks know of that and the cause is reported."""
        self.secret.remove()
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and not (self._first_failed and (self._verdict or not self._lost)):
            time.sleep(_TICK_SECONDS / 10)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again, or this process has too many files open: whoever is left out is told of
            time.sleep(_TICK_SECONDS)
            return
        connected = _Connected(Link(connection, self.secret.value, MONITOR), heard=time.monotonic())
        self._selector.register(connected.link, selectors.EVENT_READ, connected)
        self._strangers.append(connected)
        if len(self._strangers) > _MOST_STRANGERS + len(self._missing):
            self._forget(self._strangers[0])

    def _read(self, connected: _Connected) -> None:
        try:
            for message in connected.link.receive():
                if "bye" in message and connected.peer is not None:
                    self._let_go(connected, connected.peer.rank)
                    break
                self._take(connected, message)
        except Exception:  # what cannot be understood is as good as gone, and none of it may end this thread
            self._forget(connected)
            if connected.peer is not None:
                self._lost[connected.peer.rank] = time.monotonic()

    def _forget(self, connected: _Connected) -> None:
        self._selector.unregister(connected.link)
        connected.link.close()
        if connected.peer is None:
            self._strangers.remove(connected)

    def _let_go(self, connected: _Connected, rank: int) -> None:
        self._forget(connected)
        del self._ranks[rank]
        if self._alarm is not None and self._alarm.rank == rank:  # it went on after all
            self._alarm = None

    def _take(self, connected: _Connected, message: Message) -> None:
        """Take a message. Raises an Exception of any kind if the message makes no sense."""
        if connected.peer is None:
            self._greet(connected, Peer.of(message))
            return
        rank, connected.heard = connected.peer.rank, time.monotonic()
        if "section" in message:
            connected.peer.section, connected.peer.step = words(message["section"]), whole(message["step"])
            connected.placed = self._looked
        if "fails" in message:
            connected.fails = exit_code(message["fails"])
            if rank == 0:  # which may take this monitor with it before any rank can ask
                self._tell_all(first_fails=connected.fails)
                self._first_failed = True
        elif "dump" in message:
            dump = RankDump.of(message["dump"])
            if dump.rank != rank:
                raise LinkLost
            connected.dump = dump
        elif (why := alarm_of(message)) and self._alarm is None:
            self._alarm = _Alarm(time.monotonic(), rank, why, folder_name())

    def _greet(self, connected: _Connected, peer: Peer) -> None:
        if peer.rank not in self._world or peer.rank in self._ranks:
            raise LinkLost
        self._strangers.remove(connected)
        connected.peer = peer
        connected.heard, connected.placed = time.monotonic(), self._looked
        self._ranks[peer.rank] = connected
        self._missing.discard(peer.rank)
        if not self._missing:
            self.secret.remove()
        displaced = self._choose_speakers([connected])
        self._tell_of_first([connected, *displaced])
        if self._verdict is not None:
            connected.link.send(**self._verdict)

    def _choose_speakers(self, among: Iterable[_Connected]) -> list[_Connected]:
        """Choose the lowest rank on each node, rank 0 not counted, to speak when rank 0 is lost.

        Returns the ranks that no longer have this task.
        """
        displaced = []
        for connected in among:
            if connected.peer is not None and connected.peer.rank:
                chosen = self._speakers.setdefault(connected.peer.space, connected)
                if chosen.peer is not None and connected.peer.rank < chosen.peer.rank:
                    self._speakers[connected.peer.space] = connected
                    displaced.append(chosen)
        return displaced

    def _tell_of_first(self, to: Iterable[_Connected]) -> None:
        """Send ranks the place of rank 0, and whether they are to speak when it is lost."""
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
        if not self._told_of_missing and now - self._began > _COMING_SECONDS:
            self._told_of_missing = True
            self._tell_of_missing()
        while self._strangers and now - self._strangers[0].heard > _GREETING_SECONDS:
            self._forget(self._strangers[0])
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

    def _tell_of_missing(self) -> None:
        if self._missing:
            sys.stderr.write(
                f"warning: rank 0's watchdog, on port {self.address[1]} of its machine, has not been reached by "
                f"{ranks_text(self._missing)}: where one of them dies the others may not hear of it. Let the ports "
                f"between nodes be open, and give all ranks the same random {VARIABLE}, or a --save folder that all "
                "nodes share\n"
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

    def _executioners(self, silent: set[int], peers: Mapping[int, Peer]) -> dict[int, list[Peer]]:
        """Return, for each process that does not answer, a rank that can kill it.

        A stopped process would otherwise stay and keep its launcher waiting.
        """
        found: dict[int, list[Peer]] = {}
        for rank in silent:
            near = [other for other, peer in peers.items() if other not in silent and peer.space == peers[rank].space]
            if near:
                found.setdefault(min(near), []).append(peers[rank])
        return found

    def _end(self, code: int, *, at_once: bool, kill: Mapping[int, list[Peer]] | None = None) -> None:
        self._verdict = {"end": code, "at_once": at_once, "kill": []}
        for rank, connected in self._ranks.items():
            victims = [asdict(peer) for peer in (kill or {}).get(rank, ())]
            connected.link.send(**self._verdict | {"kill": victims})

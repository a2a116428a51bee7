"""Monitor: a thread of rank 0 with a connection to each rank. It detects ranks that die and reports them.

When a process is killed, the system closes its connections at once. So the monitor learns within milliseconds that a
rank has died, even if the other ranks wait on a GPU and cannot notice it. If a rank exceeds the time limit of a
section, or a communication of a rank fails, the monitor requests the section of every rank. From the answers, and from
the ranks that do not answer, it concludes which rank is missing and where. It reports this once and ends all ranks.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megalite.errors import EXIT_RESUMABLE
from megalite.process.host import listen
from megalite.process.output import say
from megalite.process.place import Place, ranks_text
from megalite.watchdog.hang_dump import RankDump
from megalite.watchdog.hang_report import death, hang, silence_text
from megalite.watchdog.link import MONITOR, Link, LinkLost, Message, Peer, alarm_of, exit_code, folder_name
from megalite.watchdog.secret import GIVE_SECRET, Secret
from megalite.watchdog.sections import ANSWER_SECONDS, MEETING, WARNING_SECONDS, Limits

Tell = Callable[[str, int], int]
"""Function that reports an error and leaves its exit code, unless a rank has reported one; returns the reported
code."""

_TOGETHER_SECONDS = 0.3  # ranks that die of one cause die within this time
_COMING_SECONDS = 60.0  # for all ranks to connect, once they have met; a warning names those that have not
_GREETING_SECONDS = 10.0  # for a new connection to prove that it is a rank
_MOST_STRANGERS = 64  # connected at the same time, not counting the ranks that have not come yet
_TICK_SECONDS = 0.1
_READING_SECONDS = 0.5  # for the messages of a tick: thousands of ranks may answer at the same time
_STOPPED_SECONDS = 2.0  # a tick that is this late
_PING_SECONDS = 1.0


@dataclass
class _Rank:
    """Rank that is connected, and what it has sent."""

    link: Link
    peer: Peer
    heard: float
    placed: float
    """Time when its place in the run was last known, or earlier; it may have moved on since."""
    fails: int | None = None
    """Exit code that it is about to end with, having said why."""
    dump: RankDump | None = None
    named: bool = False
    """True if a warning says that it gives no sign of life."""


@dataclass
class _Alarm:
    """Reason why the monitor requests the section of all ranks."""

    since: float
    rank: int
    why: Message
    name: str
    """Name of the folder that the answers are written to."""
    asked: bool = False


def _warn(text: str) -> None:
    with suppress(OSError):  # the disk of the output may be full, which must not end this thread
        say(text, to_error=True)


class Monitor(threading.Thread):
    """Monitor of all ranks, on rank 0. `address`: where it listens."""

    def __init__(
        self, first: Peer, place: Place, secret: Secret, limits: Limits, tell: Tell, folder: Path | None
    ) -> None:
        """Set up; `first` is rank 0 itself; `folder`: where the ranks write their dumps."""
        super().__init__(name="monitor", daemon=True)
        self.secret = secret
        self._first, self._limits, self._tell, self._folder = first, limits, tell, folder
        self._listener = listen("rank 0's watchdog", place)
        host, port, *_ = self._listener.getsockname()
        self.address: tuple[str, int] = (host, port)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._woken, self._waker = socket.socketpair()  # `close` ends a tick
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: None)
        self._strangers: dict[Link, float] = {}
        """Connections that have not sent their identity, the oldest first, with the time when each came."""
        self._ranks: dict[int, _Rank] = {}
        self._node_reporters: dict[str, int] = {}
        """Lowest rank of each node, without rank 0: it reports when rank 0 is lost."""
        self._world = range(place.world_size)
        self._missing = set(self._world)
        """Ranks that have never connected."""
        self._lost: dict[int, float] = {}
        self._alarm: _Alarm | None = None
        self._first_failed = self._closing = False
        self._verdict: Message | None = None
        """Message to all ranks, set once the reason for the end of the run is known."""
        self._began = self._pinged = self._looked = time.monotonic()
        self._told_of_missing = False

    def run(self) -> None:
        """Run until `close`."""
        while not self._closing:
            looks = time.monotonic()
            ready = self._selector.select(_TICK_SECONDS)
            slept = time.monotonic() - looks
            if slept > _TICK_SECONDS + _STOPPED_SECONDS:  # this process was suspended itself, so nobody was silent
                for rank in self._ranks.values():
                    rank.heard += slept
            for key, _ in ready:
                key.data()
                if time.monotonic() - looks - slept > _READING_SECONDS:
                    break  # the others are ready in the next round, too
            else:
                self._looked = looks  # messages read in the next round arrived after this time
            try:
                self._tick(time.monotonic())
            except Exception:  # a defect in the analysis: an alarm was raised, so end the run
                traceback.print_exc()
                self._end(EXIT_RESUMABLE, at_once=True)
        self._tell_all(bye=True)
        for link in (*self._strangers, *(rank.link for rank in self._ranks.values())):
            link.close()
        self._listener.close()
        self._woken.close()
        self._selector.close()
        self.secret.remove()

    def close(self) -> None:
        """Tell all ranks that the run ends without an error."""
        self._closing = True
        self._waker.close()
        self.join()

    def settle(self) -> None:
        """Wait, when rank 0 ends with an error, until all ranks know of it and the cause is reported."""
        self.secret.remove()
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and not (self._first_failed and (self._verdict or not self._lost)):
            time.sleep(_TICK_SECONDS / 10)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the other end is closed, or too many files are open: a warning names missing ranks
            time.sleep(_TICK_SECONDS)
            return
        link = Link(connection, self.secret.value, MONITOR)
        self._selector.register(link, selectors.EVENT_READ, partial(self._read, link))
        self._strangers[link] = time.monotonic()
        if len(self._strangers) > _MOST_STRANGERS + len(self._missing):
            self._forget(next(iter(self._strangers)))

    def _read(self, link: Link, rank: _Rank | None = None) -> None:
        """Read the messages of a rank, or of a stranger, which becomes a rank by its first message."""
        if rank is None and link not in self._strangers:
            return  # dropped after the selector had reported it
        try:
            for message in link.receive():
                if rank is None:
                    rank = self._greet(link, Peer.of(message))
                elif "bye" in message:
                    self._forget(link)
                    del self._ranks[rank.peer.rank]
                    if self._alarm is not None and self._alarm.rank == rank.peer.rank:  # it has continued
                        self._alarm = None
                    break
                else:
                    self._take(rank, message)
        except Exception:  # what cannot be understood counts as lost, and must not end this thread
            self._forget(link)
            if rank is not None:
                self._lost[rank.peer.rank] = time.monotonic()

    def _forget(self, link: Link) -> None:
        self._selector.unregister(link)
        link.close()
        self._strangers.pop(link, None)

    def _take(self, rank: _Rank, message: Message) -> None:
        """Take a message. Raises an Exception of any kind if the message is not valid."""
        number, rank.heard, rank.named = rank.peer.rank, time.monotonic(), False
        if "section" in message:
            rank.peer.move(message)
            rank.placed = self._looked
        if "fails" in message:
            rank.fails = exit_code(message["fails"])
            if number == 0:  # rank 0's end may end this monitor, before any rank can request it
                self._tell_all(first_fails=rank.fails)
                self._first_failed = True
        elif "dump" in message:
            dump = RankDump.of(message["dump"])
            if dump.rank != number:
                raise LinkLost
            rank.dump = dump
        elif (why := alarm_of(message)) and (self._alarm is None or "silent" in self._alarm.why):
            self._alarm = _Alarm(time.monotonic(), number, why, folder_name())

    def _greet(self, link: Link, peer: Peer) -> _Rank:
        """Accept a stranger as the rank that it says; LinkLost if there is no such rank, or it is here already."""
        if peer.rank not in self._world or peer.rank in self._ranks:
            raise LinkLost
        del self._strangers[link]
        rank = self._ranks[peer.rank] = _Rank(link, peer, time.monotonic(), self._looked)
        self._selector.modify(link, selectors.EVENT_READ, partial(self._read, link, rank))
        self._missing.discard(peer.rank)
        if not self._missing:
            self.secret.remove()
        previous = self._node_reporters.get(peer.space, peer.rank)
        self._choose_node_reporter(peer)
        self._tell_of_first(self._ranks[each] for each in {peer.rank, previous} & self._ranks.keys())
        if self._verdict is not None:
            link.send(**self._verdict)
        return rank

    def _choose_node_reporter(self, peer: Peer) -> None:
        """Make the rank its node's reporter if it is lower than the present one, and not rank 0."""
        if peer.rank:
            self._node_reporters[peer.space] = min(peer.rank, self._node_reporters.get(peer.space, peer.rank))

    def _tell_of_first(self, to: Iterable[_Rank]) -> None:
        """Send ranks the place of rank 0, and whether they report for their node when it is lost."""
        own = self._ranks.get(0)
        first, placed = (self._first, self._began) if own is None else (own.peer, own.placed)
        age = time.monotonic() - placed
        for rank in to:
            speaks = self._node_reporters.get(rank.peer.space) == rank.peer.rank
            rank.link.send(first=asdict(first), age=age, speaks=speaks)

    def _tell_all(self, **message: Any) -> None:
        for rank in self._ranks.values():
            rank.link.send(**message)

    # ------------------------------------------------------------------------------------------------ conclusions

    def _tick(self, now: float) -> None:
        """Ping the ranks, warn of those that never came, and look for deaths, then alarms, then silence.

        Args:
            now: seconds of the monotonic clock.
        """
        if now - self._pinged > _PING_SECONDS:
            self._pinged = now
            self._node_reporters.clear()  # some may have left
            for rank in self._ranks.values():
                self._choose_node_reporter(rank.peer)
            self._tell_of_first(self._ranks.values())
        if 0 in self._ranks and self._ranks[0].peer.section == MEETING:
            self._began = now  # ranks that are still connecting do not count as missing
        if not self._told_of_missing and now - self._began > _COMING_SECONDS:
            self._told_of_missing = True
            if self._missing:
                _warn(
                    f"warning: rank 0's watchdog, on port {self.address[1]} of its machine, has not been reached by "
                    f"{ranks_text(self._missing)}: if one of them dies the others may not notice. Open the ports "
                    f"between nodes. {GIVE_SECRET}"
                )
        for link in [link for link, came in self._strangers.items() if now - came > _GREETING_SECONDS]:
            self._forget(link)
        if self._verdict is not None:
            return
        if self._lost and now - min(self._lost.values()) > _TOGETHER_SECONDS:
            self._conclude_death()
        elif self._alarm is not None and not self._lost:
            self._look_into(self._alarm, now)
        elif not self._lost:
            self._find_silent(now)

    def _find_silent(self, now: float) -> None:
        """Raise an alarm for a rank that has sent nothing for too long, whatever it was doing: it is suspended."""
        for number, rank in self._ranks.items():
            silence = now - rank.heard
            if silence > WARNING_SECONDS and not rank.named:
                rank.named = True
                _warn(silence_text(rank.peer, silence))
            if silence > self._limits.silence(rank.peer.section):
                self._alarm = _Alarm(now, number, {"silent": silence}, folder_name())
                return

    def _look_into(self, alarm: _Alarm, now: float) -> None:
        """Ask all ranks for dumps, then conclude a hang, or drop an alarm for silence if every rank answers."""
        if not alarm.asked:
            if now - alarm.since > _TOGETHER_SECONDS:  # a rank may still turn out to have died, which explains all
                alarm.asked = True
                for rank in self._ranks.values():
                    rank.dump = None  # it may be the answer to an earlier alarm that was cancelled
                self._tell_all(dump=alarm.name)
            return
        waiting = {number for number, rank in self._ranks.items() if rank.dump is None}
        if waiting and now - alarm.since <= _TOGETHER_SECONDS + ANSWER_SECONDS:
            return
        silent = {number for number in waiting if not self._ranks[number].link.unread}
        if not silent and "silent" in alarm.why:  # it goes on
            self._alarm = None
        else:
            self._conclude_hang(alarm, silent, len(waiting) - len(silent), now)

    def _conclude_death(self) -> None:
        lost = [self._ranks[number] for number in sorted(self._lost)]
        failed = [rank.fails for rank in lost if rank.fails is not None]
        silent = [(rank.peer, self._lost[rank.peer.rank] - rank.placed) for rank in lost if rank.fails is None]
        if silent and set(failed) <= {EXIT_RESUMABLE}:  # a launcher ends the others when one has died
            code = self._tell(death(silent), EXIT_RESUMABLE)
        else:  # otherwise this rank, or another with the same error, reports the reason itself
            code = max(failed, key=lambda code: code != EXIT_RESUMABLE)
        self._end(code, at_once=False)

    def _conclude_hang(self, alarm: _Alarm, silent: set[int], unread: int, now: float) -> None:
        """Report a hang and end the run. `unread`: number of ranks whose messages have come but are not read."""
        dumps = {number: rank.dump for number, rank in self._ranks.items() if rank.dump is not None}
        peers = {number: rank.peer for number, rank in self._ranks.items()}
        silence = {number: now - self._ranks[number].heard for number in silent}
        folder = None if self._folder is None else self._folder / alarm.name
        message = hang(alarm.rank, alarm.why, peers, dumps, silence, folder, sorted(self._missing), unread)
        code = self._tell(message, EXIT_RESUMABLE)
        # A stopped process would keep its launcher waiting for ever, so another rank of its node kills it.
        kill: dict[int, list[Peer]] = {}
        for number in silent:
            near = [other for other, peer in peers.items() if other not in silent and peer.space == peers[number].space]
            if near:
                kill.setdefault(min(near), []).append(peers[number])
        self._end(code, at_once=True, kill=kill)

    def _end(self, code: int, *, at_once: bool, kill: Mapping[int, list[Peer]] | None = None) -> None:
        self._verdict = {"end": code, "at_once": at_once, "kill": []}
        for number, rank in self._ranks.items():
            victims = [asdict(peer) for peer in (kill or {}).get(number, ())]
            rank.link.send(**self._verdict | {"kill": victims})

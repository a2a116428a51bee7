"""Watchdog of a rank: a thread that watches the main thread's sections, tells the monitor, and ends a stuck rank.

The main thread of a rank that hangs is blocked in a collective, where no Python signal handler runs and no exception is
raised. So another thread watches the clock, writes the dump and ends the process.
"""

from __future__ import annotations

import os
import select
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megalite.errors import EXIT_RESUMABLE, CommunicationError, FileError, RendezvousError, exit_code_of
from megalite.process.bounded import within
from megalite.process.host import host_name, kill_sibling, process_space, start_of
from megalite.process.output import say
from megalite.process.place import Place
from megalite.process.signals import ignore_stop_signals, last_words
from megalite.watchdog.hang_dump import RankDump, stacks, write_dump
from megalite.watchdog.hang_report import death, hang, silence_text
from megalite.watchdog.link import Link, LinkLost, Message, Peer, connect, exit_code, folder_name, folder_named, whole
from megalite.watchdog.sections import ANSWER_SECONDS, WARNING_SECONDS, Limits, OpenSection, Sections
from megalite.watchdog.snapshot import Snapshot

if TYPE_CHECKING:
    from megalite.mailbox import Mailbox
    from megalite.watchdog.monitor import Monitor

_TICK_SECONDS = 0.5
_HEARTBEAT_SECONDS = 1.0
_STOPPED_SECONDS = 2.0  # a tick that is this late shows that the whole process was stopped
_WRITING_SECONDS = 3.0
_FINISHING_SECONDS = 60.0  # for the main thread to complete what is of use though another rank has ended
_LEAVING_SECONDS = 2.0  # for the main thread to end by itself
_VERDICT_SECONDS = 2 * ANSWER_SECONDS
_SILENT_SECONDS = 5.0  # without a message of the monitor, which sends one per second: rank 0 is suspended
_LINKING_SECONDS = 30.0
_FIRST_SECONDS = 60.0  # for rank 0 to start its monitor: all ranks reach this point together
_ADDRESS, _UNKNOWN = "megalite/watchdog", "megalite/watchdog/unknown"


def nobody_watches(mailbox: Mailbox) -> None:
    """Tell the other ranks, from rank 0, that it has no watchdog; the difference in flags is reported later."""
    mailbox.put(_ADDRESS, "")


class Watchdog:
    """Watchdog of this rank's sections and, on rank 0, of all ranks, as a context manager."""

    def __init__(
        self,
        sections: Sections,
        limits: Limits,
        report: Callable[[Mailbox | None, str, int], int],
        place: Place,
        *,
        mailbox: Mailbox | None = None,
        store_is_of_rank_0: bool = False,
        folder: Path | None = None,
        shared: Path | None = None,
    ) -> None:
        """Set up the watchdog.

        `report`: function that reports an error, once for all ranks that share a mailbox (lifecycle/failure.py).
        `mailbox`: that of the ranks, if there are several; `store_is_of_rank_0`: it ends with that process.
        `folder`: for dumps when the run hangs; `shared`: a folder that ranks on all machines see, if there are several.
        """
        self.sections, self._limits, self._report = sections, limits, report
        self._last_mailbox = None if store_is_of_rank_0 else mailbox
        self._place = place
        self._mailbox, self._folder, self._shared = mailbox, folder, shared
        self._monitor: Monitor | None = None
        self._link: Link | None = None
        self._first: Peer | None = None  # rank 0, as its monitor describes it
        self._first_placed = 0.0  # time when its place was known, or earlier
        self._is_node_reporter = place.local_rank == 0  # this rank reports an error if rank 0 is lost
        self._named_first = False
        """True if a warning says that rank 0 gives no sign of life."""
        self._first_fails: int | None = None
        self._alarm: tuple[float, Message] | None = None  # time when it was raised, and the reason
        self._leaving = self._awaits_verdict = False
        self._looked = self._heard = 0.0
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        """Connect to the monitor, which rank 0 starts, and begin to watch. A rank without connection goes on alone."""
        if self._mailbox is not None:
            begun = self._begin_monitor(self._mailbox) if self._place.rank == 0 else None
            try:
                with suppress(OSError, ValueError, LinkLost):  # the monitor warns of ranks that do not connect
                    self._link_up(*(begun or self._find_monitor(self._mailbox)))
            except BaseException:  # a stop signal
                if self._monitor is not None:
                    self._monitor.secret.remove()
                raise
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._end_watch(error)
        except (KeyboardInterrupt, SystemExit) as stop:
            if self._link is not None:  # a launcher has ended this rank because of another, which is to be named
                self._link.send(fails=exit_code_of(stop))
            raise

    def _end_watch(self, error: BaseException | None) -> None:
        if error is None:
            self._leave()
        elif isinstance(error, CommunicationError) and not isinstance(error, RendezvousError):
            self._await_verdict(error)
        elif self._link is not None:
            self._link.send(fails=exit_code_of(error))  # this rank reports the reason itself
            if self._monitor is not None:
                self._monitor.settle()

    @property
    def linked(self) -> bool:
        return self._link is not None

    def _begin_monitor(self, mailbox: Mailbox) -> tuple[str, int, bytes]:
        """Start the monitor and return its host, port and secret; the store gets what of it may be public."""
        from megalite.watchdog.monitor import Monitor
        from megalite.watchdog.secret import make_secret

        secret = make_secret(self._shared)
        tell = partial(self._report, mailbox)
        self._monitor = Monitor(self._peer(), self._place, secret, self._limits, tell, self._folder)
        last_words(secret.remove)
        self._monitor.start()
        host, port = self._monitor.address
        mailbox.put(_ADDRESS, f"{port} {secret.name}")
        return host, port, secret.value

    def _find_monitor(self, mailbox: Mailbox) -> tuple[str, int, bytes]:
        """Return the same as `_begin_monitor`, on another rank.

        Raises CommunicationError if rank 0 has not begun to watch, and OSError or ValueError if there is no secret or
        the store's value is not from rank 0.
        """
        from megalite.watchdog.secret import GIVE_SECRET, find_secret

        problem = "rank 0's watchdog did not start: rank 0 has ended, or hangs"
        text = mailbox.get(_ADDRESS, _FIRST_SECONDS, problem)  # empty: not an address
        port, _, name = text.partition(" ")
        host, number = self._place.host, whole(int(port), 2**16 - 1)
        try:
            return host, number, find_secret(name, self._shared)
        except (OSError, ValueError):
            if mailbox.add(_UNKNOWN, 1) == 1:  # one rank says it for all
                say(
                    f"warning: rank 0's watchdog and the ranks of {host_name()} have no secret in common: if one of "
                    f"them, or of others without it, dies, the others may not notice. {GIVE_SECRET}",
                    to_error=True,
                )
            raise

    def _link_up(self, host: str, port: int, secret: bytes) -> None:
        """Connect to the monitor. Raises OSError or LinkLost if it cannot be reached, or is not this run's."""
        link = connect(host, port, secret, _LINKING_SECONDS)
        # From here on, a rank that is ended while it starts must not look like one that was killed.
        last_words(partial(link.send, fails=EXIT_RESUMABLE))
        try:
            link.send(**asdict(self._peer()))
            self._looked = time.monotonic()
            deadline = self._looked + _LINKING_SECONDS
            while self._first is None and time.monotonic() < deadline:  # the monitor answers at once
                self._receive(link, _TICK_SECONDS)
        except Exception as error:  # what makes no sense does not come from the run's monitor
            raise LinkLost from error
        except BaseException as error:  # a stop signal
            link.send(fails=exit_code_of(error))
            raise
        if self._first is None:  # rank 0 is suspended, which the rendezvous notices, or this is another program
            link.send(bye=True)
            link.close()
            raise LinkLost
        self._link = link

    def _peer(self) -> Peer:
        return Peer(self._place.rank, host_name(), os.getpid(), start_of(os.getpid()), process_space(), **self._where())

    def _where(self) -> Message:
        return {"section": self._innermost().name, "step": self.sections.step}

    # ------------------------------------------------------------------------------------------------ the main thread

    def _leave(self) -> None:
        self._leaving = True
        if self._link is not None:
            self._link.send(bye=True)  # the monitor closes the connection, which wakes the thread
        self._woken.set()
        self._thread.join()
        if self._link is not None:
            self._link.close()
        if self._monitor is not None:
            self._monitor.close()

    def _await_verdict(self, error: CommunicationError) -> None:
        """Wait until the monitor, if this rank has one, reports which rank died; the watchdog then ends the process.

        If rank 0 is suspended, and the monitor with it, the watchdog reports that.

        A launcher that has seen a rank die would end the other ranks now, which is too early.
        """
        if self._link is None:
            return
        ignore_stop_signals()
        self._awaits_verdict = True
        why = {"lost": str(error)}
        self._alarm = time.monotonic(), why
        self._link.send(**why, **self._where())
        self._thread.join(3 * _VERDICT_SECONDS)

    # ------------------------------------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        """Look at messages and deadlines each tick. Time in which the whole process was stopped counts for none."""
        last = told = self._looked = time.monotonic()
        while not self._leaving:
            looks = time.monotonic()
            self._read(_TICK_SECONDS)
            self._looked, now = looks, time.monotonic()
            if now - last > _TICK_SECONDS + _STOPPED_SECONDS:
                self.sections.was_stopped(now - last)
                self._heard += now - last
            last = now
            if self._link is not None and now - told > _HEARTBEAT_SECONDS:
                told = now
                self._link.send(**self._where())
            self._check_deadlines(now)

    def _read(self, seconds: float) -> None:
        if self._link is None:
            self._woken.wait(seconds)
            return
        try:
            self._receive(self._link, seconds)
        except Exception:  # an invalid message does not end this thread: it counts as the loss of rank 0
            self._lose_first()

    def _receive(self, link: Link, seconds: float) -> None:
        """Handle the messages that arrive within the time. Raises an Exception of any kind if one is not valid."""
        poll = select.poll()  # `select` cannot handle the file descriptors of a large run
        poll.register(link, select.POLLIN)
        if poll.poll(1000 * seconds):
            for message in link.receive():
                self._take(message)

    def _take(self, message: Message) -> None:
        """Do what a message of the monitor says; unknown ones are left alone."""
        self._heard, self._named_first = time.monotonic(), False
        if "first" in message:
            self._first, self._is_node_reporter = Peer.of(message["first"]), message["speaks"]
            self._first_placed = self._looked - message["age"]
        elif "first_fails" in message:
            self._first_fails = exit_code(message["first_fails"])
        elif "dump" in message:
            self._dump(folder_named(message["dump"]))
        elif "end" in message:
            self._end(exit_code(message["end"]), at_once=message["at_once"], kill=tuple(map(Peer.of, message["kill"])))
        elif "bye" in message:  # rank 0 has reached the end of the run
            self._leaving = True

    def _check_deadlines(self, now: float) -> None:
        """Raise an alarm for a late section or a silent rank 0, and end alone if the monitor does not answer."""
        late = self._limits.overdue(self.sections.open(), self.sections.longest)
        if late is not None and (self._alarm is None or "silent" in self._alarm[1]):
            limit = self._limits.of(late.name, self.sections.longest)
            self._alarm = now, {"overdue": [late.name, late.seconds, limit]}
            if self._link is not None:
                self._link.send(**self._alarm[1], **self._where())
        if self._alarm is None and self._first is not None:
            self._find_first_silent(self._first, now)
        if self._alarm is None:
            return
        since, why = self._alarm
        if "silent" in why and self._heard > since:  # rank 0 goes on
            self._alarm = None
            return
        patience = _VERDICT_SECONDS if self._heard > since else _SILENT_SECONDS
        # The node's reporter acts first: it reports that rank 0 is suspended, before another rank kills rank 0.
        patience += 0 if self._is_node_reporter else ANSWER_SECONDS
        if self._link is None or now - since > patience:
            self._conclude_alone(why)

    def _find_first_silent(self, first: Peer, now: float) -> None:
        """Raise an alarm if rank 0 has sent nothing for too long: it is suspended, and the monitor with it."""
        silence = now - self._heard
        if silence > WARNING_SECONDS and self._is_node_reporter and not self._named_first:
            self._named_first = True
            with suppress(OSError):
                say(silence_text(first, silence), to_error=True)
        if silence > self._limits.silence(first.section):
            self._alarm = now, {"silent": silence}

    # ------------------------------------------------------------------------------------------------ how it ends

    def _dump(self, name: str) -> RankDump:
        """Report what this rank is doing: to the monitor, and in the folder of this name, if it is writable."""
        rank, world_size = self._place.rank, self._place.world_size
        recorded: Snapshot | None = Snapshot(False, ())
        if world_size > 1:
            from megalite.watchdog.flight_recorder import snapshot

            try:
                recorded = snapshot()
            except Exception:  # torch does not promise its format; the stacks are useful without it
                recorded = None
        section, seconds = self._innermost()
        step = self.sections.step
        dump = RankDump(rank, world_size, host_name(), os.getpid(), section, seconds, stacks(), recorded, step)
        if self._folder is not None:
            # The file system may be the reason for the hang, and must not block this thread. The monitor gets the dump
            # in any case.
            with suppress(FileError, OSError):
                within(_WRITING_SECONDS, partial(write_dump, self._folder / name, dump))
        if self._link is not None:
            self._link.send(dump=asdict(dump.shortened()))
        return dump

    def _innermost(self) -> OpenSection:
        nowhere = OpenSection(self.sections.failed if self._awaits_verdict else "", 0.0)
        return (self.sections.open() or [nowhere])[-1]

    def _lose_first(self) -> None:
        """Let the reporter of each node report: rank 0's process has ended, and with it the monitor."""
        if self._leaving:
            return
        suspended = time.monotonic() - self._heard > _SILENT_SECONDS
        if self._alarm is not None and self._first_fails is None and suspended:  # and killed for that
            self._conclude_alone(self._alarm[1])
        code = self._first_fails
        if code is None and self._first is not None and self._wait_to_report():
            lost = self._first, time.monotonic() - self._first_placed
            code = self._report(self._last_mailbox, death([lost]), EXIT_RESUMABLE)
        self._end(EXIT_RESUMABLE if code is None else code, at_once=False)

    def _conclude_alone(self, why: Message) -> NoReturn:
        """Conclude without the monitor, because there is none or it does not answer."""
        first = self._first if self._place.rank else None
        try:
            name = folder_name()
            own = self._dump(name)
            if self._wait_to_report():
                peers, silence = {self._place.rank: self._peer()}, {}
                if first is not None:
                    peers[0], silence[0] = first, time.monotonic() - self._heard
                folder = None if self._folder is None else self._folder / name
                message = hang(self._place.rank, why, peers, {self._place.rank: own}, silence, folder)
                self._report(self._last_mailbox, message, EXIT_RESUMABLE)
        except Exception:  # a defect must not keep this process from ending
            traceback.print_exc()
        finally:
            kill = [first] if first is not None and first.space == process_space() else []
            self._end(EXIT_RESUMABLE, at_once=True, kill=kill)

    def _wait_to_report(self) -> bool:
        """Wait for this rank's turn to report, and return whether it reports.

        If the node's reporter is lost too, another rank may report, provided that a mailbox still exists to select only
        one.
        """
        if not self._is_node_reporter:
            time.sleep(_LEAVING_SECONDS)
        return self._is_node_reporter or self._last_mailbox is not None

    def _end(self, code: int, *, at_once: bool, kill: Sequence[Peer] = ()) -> NoReturn:
        """Kill the given processes and exit at once, or with a pause in which the main thread may leave by itself."""
        for peer in kill:
            refused = kill_sibling(peer.process, peer.start)
            if refused is not None:
                with suppress(OSError):
                    say(f"warning: {peer} hangs and is left to its launcher: {refused}", to_error=True)
        if not at_once and not self._awaits_verdict:
            time.sleep(_LEAVING_SECONDS)
            until = time.monotonic() + _FINISHING_SECONDS
            while self.sections.is_finishing() and time.monotonic() < until:  # the node's agent ends this process
                time.sleep(_TICK_SECONDS)
        if self._monitor is not None:
            self._monitor.secret.remove()
        if self._place.rank == 0:
            time.sleep(_TICK_SECONDS)  # this rank may host the store, which others still use
        os._exit(code)

"""Ranks of a node, as its agent has them: it forks them, hears what they tell, and kills them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from megalite.errors import EXIT_CONFIGURATION, EXIT_FATAL, EXIT_RESUMABLE
from megalite.extras.recovery.events import Events
from megalite.extras.recovery.forks import Launched, fork_rank, record_of
from megalite.extras.recovery.lines import Lines, Message, is_own
from megalite.extras.recovery.marks import Marks
from megalite.process.host import host_name, is_suspended
from megalite.process.place import Place

GRACE_SECONDS = 0.5  # for other ranks to say why, after one has ended with an exit code
_MEMORY_FILES_OF_A_RANK = 5
_FINISHING_SECONDS = 45.0  # for ranks to finish their step; less than other agents wait for this node
_LOOK_SECONDS = 0.02  # between looks at whether they have


@dataclass(frozen=True)
class Replicas:
    """Replicas of the model: rank r is of the replica r // stride % number."""

    stride: int = 1
    number: int = 1

    def of(self, rank: int) -> int:
        return rank // self.stride % self.number


class Ranks:
    """Ranks of a node, each with its process of the launcher, and the files in memory that outlive ranks."""

    def __init__(
        self, events: Events, baseline: set[int], begun: Callable[[int], None], ended: Callable[[Launched, int], None]
    ) -> None:
        """Set up. `baseline`: open files that ranks inherit; `begun`: called with the step after which a rank goes on;
        `ended`: called with a rank that has ended, and its exit code, or the negative number of a signal."""
        self.by_number: dict[int, Launched] = {}
        """The ranks, by the launcher's numbers."""
        self._events, self._baseline, self._begun, self._ended = events, baseline, begun, ended
        self._memory: dict[int, list[int]] = {}
        self._replicas = Replicas()

    @property
    def all(self) -> list[Launched]:
        return [rank for _, rank in sorted(self.by_number.items())]

    @property
    def first(self) -> Launched:
        return self.by_number[min(self.by_number)]

    @property
    def running(self) -> bool:
        return any(rank.process for rank in self.by_number.values())

    def keep_memory(self, ranks: Set[int]) -> None:
        """Give these ranks the memory of others that were on this node, in which copies may be, and close the rest."""
        left = [self._memory.pop(number) for number in sorted(self._memory.keys() - ranks)]
        for number in sorted(ranks - self._memory.keys()):
            if left:
                self._memory[number] = left.pop(0)
        for descriptor in (descriptor for files in left for descriptor in files):
            os.close(descriptor)

    def accept(self, listener: socket.socket, refuse: bool) -> Launched | None:
        """Let a process of the launcher connect, unless one of an earlier attempt has still to be told its end."""
        try:
            connection, _ = listener.accept()
        except OSError:
            return None
        if refuse or any(rank.ended for rank in self.all) or not is_own(connection):
            connection.close()  # it tries again, and may start an agent then
            return None
        rank = Launched(Lines(connection))
        rank.lines.send({"welcome": True})
        return rank

    def greet(self, rank: Launched, hello: Message, refuse: bool) -> bool:
        """Take a process of the launcher in. Returns False if it is one too many."""
        rank.hello, rank.place = hello, Place(**hello["place"])
        rank.trains = rank.place
        number = rank.place.rank
        if refuse or number in self.by_number:
            why = f"rank {number} was started twice by one launcher, for --save {hello['save']}: two would overwrite "
            rank.lines.send({"end": EXIT_CONFIGURATION, "error": f"{why}each other's checkpoints"})
            return False
        self.by_number[number] = rank
        return True

    @property
    def may_restart(self) -> bool:
        """Tell whether the launcher may start the ranks again: torchrun may."""
        environment = self.first.hello["environment"]
        done = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) > done

    def fork(self, generation: int) -> None:
        """Start the processes of all ranks."""
        for rank in self.all:
            files: list[int] = []
            if rank.hello["copies"]:
                number = rank.place.rank  # they stay with the node, whichever seat it has
                if number not in self._memory:
                    names = (f"megalite rank {number} {i}" for i in range(_MEMORY_FILES_OF_A_RANK))
                    self._memory[number] = [os.memfd_create(name) for name in names]
                files = self._memory[number]
                rank.marks = Marks(files[-1])
                rank.marks.clear()
            fork_rank(rank, generation, files, self._baseline)
            self._events.on_read(rank.pipe, partial(self._hear, rank))
            descriptor = os.pidfd_open(rank.process)
            self._events.on_read(descriptor, partial(self._reap, rank, descriptor))

    def _hear(self, rank: Launched) -> None:
        """Take what a rank tells; its words are short, and come whole."""
        if rank.pipe < 0:
            return
        try:
            data = os.read(rank.pipe, 4096)
        except BlockingIOError:
            return
        if not data:
            self._close_pipe(rank)
        for line in data.decode(errors="replace").splitlines():
            word, _, number = line.partition(" ")
            if word == "end":
                rank.told = int(number)
            elif word == "begun":
                self._begun(int(number))
            elif word == "replicas":
                self._replicas = Replicas(*map(int, number.split()))

    def _close_pipe(self, rank: Launched) -> None:
        self._events.forget(rank.pipe)
        os.close(rank.pipe)
        rank.pipe = -1

    def _reap(self, rank: Launched, descriptor: int) -> None:
        """Handle the end of a rank."""
        self._events.forget(descriptor)
        os.close(descriptor)
        self.kill(rank)  # the processes that it has started, in its group; its number is taken until it is waited for
        _, status = os.waitpid(rank.process, 0)
        self._hear(rank)
        if rank.pipe >= 0:  # a process of the rank lives on, and holds the pipe
            self._close_pipe(rank)
        rank.process = 0
        self._ended(rank, os.waitstatus_to_exitcode(status))

    def kill(self, rank: Launched) -> None:
        """Kill a rank, with the processes that it has started."""
        if rank.process:
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    kill(rank.process, signal.SIGKILL)

    def kill_all(self) -> None:
        for rank in self.all:
            self.kill(rank)

    def end_after(self, seconds: float, failed: Collection[int]) -> None:
        """Kill all ranks after some time, or once those have finished their step that need none of the failed ones."""
        lost = {self._replicas.of(rank) for rank in failed}
        for rank in self.all:
            if failed and rank.is_computing and self._replicas.of(rank.trains.rank) not in lost:
                rank.marks.ask()
        until = time.monotonic() + _FINISHING_SECONDS

        def look() -> None:
            if time.monotonic() < until and any(rank.is_computing and rank.marks.is_asked for rank in self.all):
                self._events.after(_LOOK_SECONDS, "ranks", look)
            else:
                self.kill_all()

        self._events.after(seconds, "ranks", look)

    def end_suspended(self, seconds: float) -> None:
        """Kill ranks that are suspended, now and then: once another one has finished, no watchdog sees it any more."""

        def look() -> None:
            for rank in self.all:
                if is_suspended(rank.process):
                    self.kill(rank)
            self.end_suspended(seconds)

        self._events.after(seconds, "suspended", look)

    def dismiss(self, end: Message, generation: int, speaks: bool) -> None:
        """Kill what is left, and give the processes of the launcher their exit code, and the first one the error if it
        `speaks`. `generation`: the last one."""
        self.kill_all()
        for rank in self.all:
            record = record_of(rank, generation)
            rank.lines.close_descriptors()
            rank.lines.send(
                {
                    "end": end["end"],
                    "error": end.get("error") if speaks and rank is self.first else None,
                    "record": record if record and os.path.exists(record) else None,
                }
            )


def last_word(rank: Launched, code: int, stopped: bool, node: int | None) -> Message:
    """Return what is said on the board of a rank that has ended before it finished. `stopped`: it was asked to;
    `node`: its node, which is sick if this happens often; None without spare nodes."""
    number = rank.trains.rank
    if code in (EXIT_CONFIGURATION, EXIT_FATAL) or code == rank.told == EXIT_RESUMABLE or stopped:
        may_go_on = code < 0 or rank.flags is not None  # with all nodes, in the run's own layout
        return {"end": EXIT_RESUMABLE if may_go_on else code, "rank": number}
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return {
        "failed": f"rank {number} on {host_name()} {how}",
        "grace": 0.0 if code < 0 else GRACE_SECONDS,
        "ranks": [number],
        "node": None if code == EXIT_RESUMABLE else node,  # it has ended because of another rank
    }

"""Agent of a node: a process that has imported everything, and forks the node's ranks, one generation after another.

It has one thread, since it forks, and waits for nothing but events: messages of the launcher's processes, the end of a
rank or of the launcher, and notices of the other agents (board.py). Agents go through these states together:

- meeting: each tells on the board which ranks it has. Rank 0's agent gathers them, and decides: begin, or end the run.
- running: the ranks train. Whoever sees a rank fail says so on the board, where the first word counts.
- ending: all agents end their ranks, and meet again. If a rank has ended the run on purpose, they end instead.

An agent alone is waiting (for the launcher's processes), connecting (to the store), spare (it has no ranks to fork),
leaving (it has told the others that it ends) or left.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Set
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from megalite.errors import EXIT_CONFIGURATION, EXIT_FATAL, EXIT_FINISHED, EXIT_INTERNAL, EXIT_RESUMABLE
from megalite.extras.recovery.forks import Launched, fork_rank, record_of
from megalite.extras.recovery.lines import Ended, Lines, Message, is_own
from megalite.extras.recovery.notices import Notices
from megalite.extras.recovery.preload import preload
from megalite.process.host import host_name, is_suspended
from megalite.process.output import require_streams
from megalite.process.place import Place, ranks_text
from megalite.process.signals import STOP_SIGNALS

if TYPE_CHECKING:
    from megalite.extras.recovery.spares import Spares

_MEMORY_FILES_OF_A_RANK = 4
_WITHOUT_PROGRESS = 3
"""Generations after which the run is given up: all begun after the same step, or in a row and none begun."""
_GRACE_SECONDS = 0.5  # for other ranks to say why, after one has ended with an exit code
_LAST_SECONDS = 60.0  # for the ranks of a run that ends on purpose
_MEETING_SECONDS = 60.0  # for the other agents, which have learned of the end of a generation
_LEAVING_SECONDS = 5.0  # for the other agents to learn of the end, from a store that ends with this process
_RESTART_SECONDS = 600.0  # for a launcher to start the ranks again
_COMING_SECONDS = 60.0  # for the first rank to come
_STORE_SECONDS = 60.0  # for a store that answers late, beyond the time for ranks to meet
_ANSWER_SECONDS = 10.0  # for the notice of rank 0's agent, and for the launcher's processes to end
_NOTICE_SECONDS = 0.5  # for a last notice to reach the store


class Agent:
    """The agent of a node, until its launcher ends."""

    def __init__(self, listener: socket.socket, launcher: int, baseline: set[int]) -> None:
        """Set up. `baseline`: open files that ranks inherit."""
        self._listener, self._baseline = listener, baseline
        self._selector = selectors.DefaultSelector()
        self._on_read(listener, self._accept)
        self._launcher = os.pidfd_open(launcher)
        self._on_read(self._launcher, self._leave)
        self._ranks: dict[int, Launched] = {}
        self._memory: dict[int, list[int]] = {}
        self._over = False
        self._deadline: tuple[float, Callable[[], None]] | None = None
        self._wait(_COMING_SECONDS, self._leave)
        self._state = "waiting"
        self._notices: Notices | None = None
        self._spares: Spares | None = None
        self._forget_run()

    def _forget_run(self) -> None:
        self._generation, self._stopped = 0, False
        self._verdict: Message | None = None
        self._end: Message = {}
        self._came: set[int] = set()
        self._finished: set[int] = set()
        self._left: set[int] = set()
        self._begun: int | None = None
        self._history: list[tuple[int, int | None, str]] = []
        self._why, self._failed_at = "", 0.0

    # ------------------------------------------------------------------------------------------------ events

    def run(self) -> None:
        """Run until the launcher has ended, or has nothing more for this agent to do."""
        try:
            self._handle_events()
        except Exception:
            self._tell_defect(traceback.format_exc())
        self._kill_all()
        self._close_board()

    def _handle_events(self) -> None:
        while not self._over:
            left = None if self._deadline is None else max(self._deadline[0] - time.monotonic(), 0.0)
            for key, _ in self._selector.select(left):
                if not self._over and key.fd in self._selector.get_map():
                    key.data()
            if self._deadline is not None and time.monotonic() >= self._deadline[0]:
                (_, action), self._deadline = self._deadline, None
                action()

    def _tell_defect(self, trace: str) -> None:
        """End the run because of an error of the agent itself, which has no output of its own."""
        with suppress(Exception):
            self._end_all(
                {
                    "end": EXIT_INTERNAL,
                    "error": f"the agent of {host_name()}'s ranks has a defect, and they end with it: please report "
                    f"this\n{trace}",
                    "local": True,
                }
            )

    def _on_read(self, what: Any, action: Callable[[], None]) -> None:
        self._selector.register(what, selectors.EVENT_READ, action)

    def _wait(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something after some time, in place of what was to be done before."""
        self._deadline = time.monotonic() + seconds, action

    def _leave(self) -> None:
        self._over = True

    def _accept(self) -> None:
        """Let a process of the launcher connect, unless one of an earlier attempt has still to be told its end."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        ending = self._state == "left" or any(rank.ended for rank in self._ranks.values())
        if ending or not is_own(connection):  # it tries again, and may start an agent then
            connection.close()
            return
        lines = Lines(connection)
        self._on_read(lines, partial(self._read, Launched(lines)))
        lines.send({"welcome": True})

    def _read(self, rank: Launched) -> None:
        try:
            for message in rank.lines.receive():
                if "place" in message:
                    self._greet(rank, message)
                elif "signal" in message:
                    self._forward(rank, message["signal"])
                elif "stop" in message and self._state in ("waiting", "connecting", "meeting"):
                    self._forward(rank, signal.SIGTERM)  # in other states, the ranks look for the file
        except Ended:
            self._lose(rank)

    def _greet(self, rank: Launched, hello: Message) -> None:
        """Take a process of the launcher in, and begin once all of this node are there."""
        rank.hello, rank.place = hello, Place(**hello["place"])
        rank.trains = rank.place
        number = rank.place.rank
        if self._state != "waiting" or number in self._ranks:
            rank.lines.send(
                {
                    "end": EXIT_CONFIGURATION,
                    "error": f"rank {number} was started twice by one launcher, for --save {hello['save']}: two would "
                    "overwrite each other's checkpoints",
                }
            )
            return
        self._ranks[number] = rank
        if len(self._ranks) == (rank.place.local_world_size or 1):
            self._open_board()
        elif len(self._ranks) == 1:
            self._wait(hello["meeting_seconds"], self._miss_local_ranks)

    def _miss_local_ranks(self) -> None:
        first = self._first
        seconds = first.hello["meeting_seconds"]
        self._end_all(
            {
                "end": EXIT_RESUMABLE,
                "error": f"{len(self._ranks)} of {first.place.local_world_size} ranks of {host_name()} came to their "
                f"node's agent within {seconds:.0f} s: {ranks_text(self._ranks)}",
                "local": True,
            }
        )

    def _forward(self, rank: Launched, number: int) -> None:
        """Pass a stop signal on. From now on ranks are not started again."""
        if self._state == "spare":  # the others go on without this node
            self._give_node_up({"end": EXIT_RESUMABLE})
            return
        self._stopped = True
        if rank.process:
            with suppress(ProcessLookupError):
                os.kill(rank.process, number)
        elif self._state == "meeting":
            self._first_word("roster", {"end": EXIT_RESUMABLE})
        elif self._state in ("waiting", "connecting"):
            self._end_all({"end": EXIT_RESUMABLE})

    def _lose(self, rank: Launched) -> None:
        """Handle the end of a process of the launcher: nobody would get the exit code of its rank."""
        self._selector.unregister(rank.lines)
        rank.lines.close()
        if self._ranks.get(rank.place.rank) is not rank:
            return
        if self._state == "waiting":
            del self._ranks[rank.place.rank]
        elif self._state != "left":
            self._kill(rank)
            why = f"rank {rank.place.rank}'s process of the launcher on {host_name()} has ended: the ranks end with it"
            end = {"end": EXIT_RESUMABLE, "error": why}
            if self._spares is not None and self._spares.node and not self._stopped:
                self._give_node_up(end)
            else:
                self._first_word("roster" if self._state == "meeting" else "over", end)
        rank.ended = True
        if self._state == "left" and all(each.ended for each in self._ranks.values()):
            self._await_restart()

    # ------------------------------------------------------------------------------------------------ the board

    @property
    def _first(self) -> Launched:
        """Lowest rank of this node."""
        return self._ranks[min(self._ranks)]

    @property
    def _decides(self) -> bool:
        return 0 in self._ranks

    def _open_board(self) -> None:
        """Fork the process that calls the store."""
        self._keep_memory(self._ranks.keys())  # the launcher may have numbered the ranks anew
        self._notices = Notices(self._first, self._baseline)
        self._on_read(self._notices, self._read_board)
        self._state = "connecting"
        self._wait(self._first.hello["meeting_seconds"] + _STORE_SECONDS, self._lose_board)

    def _keep_memory(self, ranks: Set[int]) -> None:
        """Give these ranks the memory of others that were on this node, in which copies may be, and close the rest."""
        left = [self._memory.pop(number) for number in sorted(self._memory.keys() - ranks)]
        for number in sorted(ranks - self._memory.keys()):
            if left:
                self._memory[number] = left.pop(0)
        for descriptor in (descriptor for files in left for descriptor in files):
            os.close(descriptor)

    def _read_board(self) -> None:
        """Handle what the board's process has read, but for notices of earlier generations."""
        assert self._notices is not None
        try:
            messages = self._notices.receive()
        except Ended:
            self._selector.unregister(self._notices)
            self._lose_board()
            return
        for message in messages:
            if "ready" in message and self._state == "connecting":
                self._know_spares()
                self._meet()
            elif "failed" in message:
                self._end_all({"end": message["failed"], "error": message["error"], "local": True})
            elif message.get("generation") == self._generation:
                _HANDLERS[message["kind"]](self, message["value"])

    def _lose_board(self) -> None:
        if self._state == "leaving":  # rank 0's agent has ended, and the store with it
            self._end_all(self._end)
        elif self._state != "left":
            why = "the store through which the agents of all nodes meet cannot be reached any more"
            self._end_all({"end": EXIT_RESUMABLE, "error": why, "local": True})

    def _close_board(self) -> None:
        callers: tuple[Notices | Spares | None, ...] = (self._notices, self._spares)
        for caller in callers:
            if caller is not None:
                with suppress(KeyError):
                    self._selector.unregister(caller)
                caller.close()
        self._notices = self._spares = None

    def _watch(self, kind: str) -> None:
        if self._notices is not None:
            self._notices.watch(self._generation, kind)

    def _first_word(self, kind: str, value: Message) -> None:
        """Write a notice, of which the first one counts."""
        if self._notices is not None:
            self._notices.first(self._generation, kind, value)

    def _add(self, kind: str, value: Any) -> None:
        if self._notices is not None:
            self._notices.add(self._generation, kind, value)

    # ------------------------------------------------------------------------------------------------ meeting

    def _meet(self) -> None:
        """Tell which ranks are here, for the next generation."""
        if self._notices is not None:
            self._notices.forget(self._generation)
        self._generation += 1
        self._state, self._verdict = "meeting", None
        self._came, self._finished = set(), set()
        for kind in ("roster", *(("came", "finished") if self._decides else ())):
            self._watch(kind)
        self._add("came", {"ranks": list(self._ranks), "stopped": self._stopped, "host": host_name()})
        first = self._generation == 1
        seconds = self._first.hello["meeting_seconds"] if first else _MEETING_SECONDS
        if not self._decides:
            seconds += _ANSWER_SECONDS + (0.0 if self._spares is None else _MEETING_SECONDS)
        self._wait(seconds, self._miss)

    def _miss(self) -> None:
        """Go on without those that have not come, if spare nodes can take their places, or end the run."""
        if not self._decides:
            self._end_all({"end": EXIT_RESUMABLE, "error": "rank 0's agent does not answer", "local": True})
            return
        missing = self._awaited - self._came
        if self._spares is not None:
            self._spares.mark_absent(missing)
            self._begin_if_complete()
            self._wait(_ANSWER_SECONDS, self._lose_board)
            return
        why = f"{ranks_text(missing)} did not come to generation {self._generation}: their nodes are lost, or cut off"
        self._first_word("roster", {"end": EXIT_RESUMABLE, "error": why})
        self._wait(_ANSWER_SECONDS, self._lose_board)

    def _see_came(self, value: Message) -> None:
        self._came.update(value["ranks"])
        self._stopped = self._stopped or value["stopped"]
        if self._spares is not None:
            self._grow(self._spares, self._spares.mark_present(value["ranks"], value["host"]))
            if self._generation == 1 and self._state == "meeting" and self._spares.are_enough(self._came):
                self._hurry()
        self._begin_if_complete()

    def _hurry(self) -> None:
        """Wait no longer than a minute from now."""
        if self._deadline is None or self._deadline[0] > time.monotonic() + _MEETING_SECONDS:
            self._wait(_MEETING_SECONDS, self._miss)

    def _begin_if_complete(self) -> None:
        """Decide how it goes on, once all nodes that are not lost have come."""
        if self._state == "meeting" and self._came >= self._awaited:
            self._first_word("roster", self._decide())

    def _decide(self) -> Message:
        """Return how it goes on, once all have come."""
        if self._stopped:
            return {"end": EXIT_RESUMABLE}
        ended = self._history
        begun = [end for end in ended if end[1] is not None]
        for latest in (begun[-_WITHOUT_PROGRESS:], ended[-_WITHOUT_PROGRESS:]):
            steps = {step for _, step, _ in latest}
            if len(latest) == _WITHOUT_PROGRESS and len(steps) == 1:
                step = steps.pop()
                where = "ended before they began to train" if step is None else f"began after step {step} and failed"
                told = "; ".join(f"generation {number}: {why}" for number, _, why in latest)
                return {"end": EXIT_FATAL, "error": f"{_WITHOUT_PROGRESS} generations {where}: {told}"}
        return {"begin": True} if self._spares is None else self._fill_seats(self._spares)

    def _see_roster(self, value: Message) -> None:
        """Start the ranks, or end the run, as has been decided."""
        if self._state != "meeting":  # this node has given itself up
            return
        if "end" in value or self._stopped:
            if "end" not in value:  # the others begin, and would wait for these ranks
                self._first_word("over", {"end": EXIT_RESUMABLE})
            self._leave_together(value if "end" in value else {"end": EXIT_RESUMABLE})
            return
        self._deadline, self._state = None, "running"
        self._begun = None
        self._watch("over")
        if self._spares is not None:
            trains = self._spares.take_seats(self._ranks.values(), value["seats"])
            self._keep_memory(self._ranks.keys() if trains else set())
            if not trains:
                self._state = "spare"
                return
        if lost := [rank for rank in self._ranks.values() if rank.ended]:
            self._first_word("over", {"end": EXIT_RESUMABLE, "error": f"rank {lost[0].place.rank} has ended"})
            return
        for _, rank in sorted(self._ranks.items()):
            self._fork(rank)

    # ------------------------------------------------------------------------------------------------ running

    def _fork(self, rank: Launched) -> None:
        """Start the process of a rank."""
        files: list[int] = []
        if rank.hello["copies"]:
            number = rank.place.rank  # they stay with the node, whichever seat it has
            if number not in self._memory:
                names = (f"megalite rank {number} {i}" for i in range(_MEMORY_FILES_OF_A_RANK))
                self._memory[number] = [os.memfd_create(name) for name in names]
            files = self._memory[number]
        fork_rank(rank, self._generation, files, self._baseline)
        self._on_read(rank.pipe, partial(self._hear, rank))
        descriptor = os.pidfd_open(rank.process)
        self._on_read(descriptor, partial(self._reap, rank, descriptor))

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
            elif word == "begun" and self._begun is None:
                self._begun = int(number)
                if self._decides and self._why:
                    seconds = time.monotonic() - self._failed_at
                    after = f"went on after step {number}, {seconds:.1f} s later"
                    self._say(f"generation {self._generation}: {self._why}; {after}")

    def _close_pipe(self, rank: Launched) -> None:
        self._selector.unregister(rank.pipe)
        os.close(rank.pipe)
        rank.pipe = -1

    def _reap(self, rank: Launched, descriptor: int) -> None:
        """Handle the end of a rank."""
        self._selector.unregister(descriptor)
        os.close(descriptor)
        self._kill(rank)  # the processes that it has started, in its group; its number is taken until it is waited for
        _, status = os.waitpid(rank.process, 0)
        code = os.waitstatus_to_exitcode(status)
        self._hear(rank)
        if rank.pipe >= 0:  # a process of the rank lives on, and holds the pipe
            self._close_pipe(rank)
        rank.process = 0
        if self._state == "running":
            self._judge(rank, code)
        if self._state == "ending":
            self._end_generation()

    def _judge(self, rank: Launched, code: int) -> None:
        """Say on the board how a rank has ended, unless it has finished."""
        number = rank.trains.rank
        if code == rank.told == EXIT_FINISHED:
            if not any(each.process for each in self._ranks.values()):
                self._add("finished", [each.trains.rank for each in self._ranks.values()])
                self._state = "ending"
            elif self._deadline is None:
                self._wait(self._first.hello["meeting_seconds"], self._kill_suspended)
            return
        if code in (EXIT_CONFIGURATION, EXIT_FATAL) or code == rank.told == EXIT_RESUMABLE or self._stopped:
            self._first_word("over", {"end": code if code >= 0 else EXIT_RESUMABLE, "rank": number})
            self._state = "ending"
            self._wait(_LAST_SECONDS, self._kill_all)
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        why = f"rank {number} on {host_name()} {how}"
        grace = 0.0 if code < 0 else _GRACE_SECONDS
        # With EXIT_RESUMABLE a rank ends because of another one.
        node = None if self._spares is None or code == EXIT_RESUMABLE else self._spares.node
        self._first_word("over", {"failed": why, "grace": grace, "node": node})
        self._state = "ending"
        self._wait(grace, self._kill_all)

    def _kill_suspended(self) -> None:
        """Kill ranks that are suspended after others have finished: no watchdog sees it any more."""
        for rank in self._ranks.values():
            if is_suspended(rank.process):
                self._kill(rank)
        self._wait(self._first.hello["meeting_seconds"], self._kill_suspended)

    def _see_finished(self, value: list[int]) -> None:
        self._finished.update(value)
        if len(self._finished) == self._first.trains.world_size:
            self._first_word("over", {"end": EXIT_FINISHED})

    def _see_over(self, value: Message) -> None:
        """End this node's ranks, because of the first word on the end of this generation."""
        if self._verdict is not None or self._state == "leaving":
            return
        self._verdict = value
        if self._state == "running":
            self._state = "ending"
            asked = "end" in value and "error" not in value
            self._wait(_LAST_SECONDS if asked else value.get("grace", _GRACE_SECONDS), self._kill_all)
        if "failed" in value:
            self._why, self._failed_at = value["failed"], time.monotonic()
            if self._spares is not None:
                self._spares.seats.fail(value.get("node"))
        self._end_generation()

    def _end_generation(self) -> None:
        """Go on once the ranks of this node have ended, and it is known why."""
        if any(rank.process for rank in self._ranks.values()):
            return
        if self._verdict is None:
            if not all(rank.told == EXIT_FINISHED for rank in self._ranks.values()):  # ranks elsewhere may take longer
                self._wait(self._first.hello["meeting_seconds"], self._lose_board)
            return
        self._deadline = None
        if "end" in self._verdict:
            self._leave_together(self._verdict)
            return
        if self._decides and "lost" not in self._verdict:
            self._history.append((self._generation, self._begun, self._verdict["failed"]))
        self._meet()

    def _kill(self, rank: Launched) -> None:
        if rank.process:
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    kill(rank.process, signal.SIGKILL)

    def _kill_all(self) -> None:
        for rank in self._ranks.values():
            self._kill(rank)

    # ------------------------------------------------------------------------------------------------ spare nodes

    @property
    def _awaited(self) -> set[int]:
        """Return the launcher's numbers of the ranks that are to come: all, but for those of lost nodes."""
        everyone = set(range(self._first.place.world_size))
        return everyone if self._spares is None else everyone - self._spares.absent

    def _know_spares(self) -> None:
        if self._first.hello["spare_nodes"] or self._first.hello["replica_ranks"]:
            from megalite.extras.recovery.spares import Spares

            self._spares = Spares(self._first, self._baseline)
            self._on_read(self._spares, self._read_beats)

    def _read_beats(self) -> None:
        """Handle that nodes are silent, or heard of again."""
        assert self._spares is not None
        try:
            messages = self._spares.receive()
        except Ended:
            self._selector.unregister(self._spares)
            self._lose_board()
            return
        for message in messages:
            if "silent" in message:
                self._lose_node(self._spares, message["silent"])
            elif message["back"] not in self._spares.seats.nodes:
                self._spares.seats.absent.discard(message["back"])
                self._grow(self._spares, message["back"])

    def _lose_node(self, spares: Spares, node: int) -> None:
        """End the generation because a node does not answer any more, unless the node only waits."""
        trains, name = node in spares.seats.nodes, spares.mark_lost(node)
        if trains and self._state == "running":
            self._first_word("over", {"failed": f"{name} does not answer any more", "grace": 0.0, "lost": True})
        elif not trains:
            self._say(f"{name} does not answer any more; {spares.waiting()}")
        self._begin_if_complete()

    def _grow(self, spares: Spares, node: int) -> None:
        """End the generation if more ranks can train with a node that is there again."""
        if self._state == "running" and (why := spares.growth(node)):
            self._first_word("over", {"failed": why, "grace": 0.0, "lost": True})

    def _give_node_up(self, end: Message) -> None:
        """End this node alone: another one takes its place."""
        if self._state == "running":
            self._first_word("over", {"failed": end["error"], "grace": 0.0, "lost": True})
        self._kill_all()
        self._end, self._state = {**end, "local": True}, "leaving"
        self._wait(_NOTICE_SECONDS, partial(self._end_all, self._end))

    def _fill_seats(self, spares: Spares) -> Message:
        """Return which nodes train; or the end of the run, if they are too few."""
        filled = spares.fill()
        if filled:
            self._history = []  # other nodes may get further
        told = [self._why, filled] if self._generation > 1 else [filled, spares.waiting()]
        text = "; ".join(filter(None, told))
        if missing := spares.missing():
            return {"end": EXIT_RESUMABLE, "error": f"{missing} ({text})"}
        if self._generation > 1:
            self._why = text
        else:
            self._say(text)
        return {"begin": True, "seats": spares.seats.nodes}

    def _say(self, text: str) -> None:
        self._ranks[0].lines.send({"say": text})

    # ------------------------------------------------------------------------------------------------ the end

    def _leave_together(self, end: Message) -> None:
        """End the run, once the other agents know of it: the store may end with this process."""
        self._end, self._state = end, "leaving"
        if not self._decides:
            self._add("left", list(self._ranks))
            self._wait(_NOTICE_SECONDS, partial(self._end_all, end))
            return
        self._left = set(self._ranks)
        if self._left >= self._awaited:
            self._end_all(end)
        else:
            self._watch("left")
            self._wait(_LEAVING_SECONDS, partial(self._end_all, end))

    def _see_left(self, value: list[int]) -> None:
        self._left.update(value)
        if self._left >= self._awaited and self._state == "leaving":
            self._end_all(self._end)

    def _end_all(self, end: Message) -> None:
        """Kill what is left, and give the processes of the launcher their exit code."""
        self._kill_all()
        self._state = "left"
        for rank in self._ranks.values():
            speaks = rank is self._first and (self._decides or end.get("local"))
            record = record_of(rank, self._generation)
            rank.lines.close_descriptors()
            rank.lines.send(
                {
                    "end": end["end"],
                    "error": end.get("error") if speaks else None,
                    "record": record if record and os.path.exists(record) else None,
                }
            )
        self._code = end["end"]
        self._wait(_ANSWER_SECONDS, self._leave)
        if all(rank.ended for rank in self._ranks.values()):
            self._await_restart()

    def _await_restart(self) -> None:
        """Wait for the launcher to start the ranks again, if it may do so."""
        environment = self._first.hello["environment"]
        self._close_board()
        left = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) - int(
            environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        )
        if self._code == EXIT_FINISHED or left <= 0:
            self._over = True
            return
        self._ranks = {}
        self._forget_run()
        self._state = "waiting"
        self._wait(_RESTART_SECONDS, self._leave)


_HANDLERS: dict[str, Callable[[Agent, Any], None]] = {
    "came": Agent._see_came,
    "roster": Agent._see_roster,
    "over": Agent._see_over,
    "finished": Agent._see_finished,
    "left": Agent._see_left,
}


def command() -> None:
    """Run the agent. Arguments: the descriptor of the socket that listens, and the process ID of the launcher."""
    require_streams()  # ranks write to them, though the launcher may have closed those of the agent
    descriptor, launcher = map(int, sys.argv[1:])
    for stop in STOP_SIGNALS:  # SLURM sends them to every process of a step; a rank has handlers of its own
        signal.signal(stop, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    preload()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):  # until here, an error goes where the first rank's go
        os.dup2(nothing, number)
    os.close(nothing)
    listener = socket.socket(fileno=descriptor)
    baseline = _open_files() - {descriptor}
    try:
        agent = Agent(listener, launcher, baseline)
    except ProcessLookupError:  # the launcher has ended meanwhile
        return
    agent.run()


def _open_files() -> set[int]:
    """Return the descriptors of the open files, without the one that this takes itself."""
    return {number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{number}")}

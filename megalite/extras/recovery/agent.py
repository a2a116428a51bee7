"""Agent of a node: a process that has imported everything, and forks the node's ranks, one generation after another.

It has one thread, since it forks, and waits for nothing but events (events.py): messages of the launcher's processes,
the end of a rank or of the launcher (ranks.py), and notices of the other agents (board.py). These states follow each
other, and the timers of one end with it:

- waiting: for the launcher's processes.
- connecting: to the store, in which the agents of all nodes meet.
- meeting: each agent tells on the board which ranks it has. Rank 0's agent decides (decision.py): begin, or end.
- running: the ranks train. Whoever sees a rank fail says so on the board, where the first word counts.
- spare: others train, and this node has no ranks to fork.
- ending: all agents end their ranks, and meet again. If a rank has ended the run on purpose, they leave instead.
- leaving: this agent has told the others that it ends.
- left: the launcher's processes have their exit codes. If the launcher may start them again, the agent waits for them.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from functools import partial
from typing import Literal

from megalite.errors import EXIT_FINISHED, EXIT_INTERNAL, EXIT_RESUMABLE
from megalite.extras.recovery.decision import Decision
from megalite.extras.recovery.events import Events
from megalite.extras.recovery.forks import Launched
from megalite.extras.recovery.lines import Ended, Message
from megalite.extras.recovery.notices import Notices
from megalite.extras.recovery.preload import preload
from megalite.extras.recovery.ranks import GRACE_SECONDS, Ranks, last_word
from megalite.extras.recovery.spares import Spares
from megalite.process.host import host_name
from megalite.process.output import require_streams
from megalite.process.place import ranks_text
from megalite.process.signals import STOP_SIGNALS

_State = Literal["waiting", "connecting", "meeting", "running", "spare", "ending", "leaving", "left"]

_LAST_SECONDS = 60.0  # for the ranks of a run that ends on purpose
_MEETING_SECONDS = 60.0  # for the other agents, which have learned of the end of a generation
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
        self._events = Events()
        self._events.on_read(listener, self._accept)
        self._launcher = os.pidfd_open(launcher)
        self._events.on_read(self._launcher, self._events.stop)
        self._ranks = Ranks(self._events, baseline, self._see_begun, self._see_end)
        self._notices: Notices | None = None
        self._spares: Spares | None = None
        self._begin_run(_COMING_SECONDS)

    def _begin_run(self, seconds: float) -> None:
        """Wait so long for the launcher's processes."""
        self._ranks.by_number = {}
        self._decision: Decision | None = None
        self._stopped = False
        self._verdict: Message | None = None
        self._enter("waiting")
        self._events.after(seconds, "first rank", self._events.stop)

    def run(self) -> None:
        """Run until the launcher has ended, or has nothing more for this agent to do."""
        try:
            self._events.run()
        except Exception:
            # It has no output of its own.
            why = f"the agent of {host_name()}'s ranks has a defect, and they end with it: please report this\n"
            with suppress(Exception):
                self._end_alone(EXIT_INTERNAL, why + traceback.format_exc())
        self._ranks.kill_all()
        self._close_board()

    def _enter(self, state: _State) -> None:
        """Change the state. What was to be done after some time in the one before is not done any more."""
        self._state: _State = state
        self._events.cancel_timers()

    # ---------------------------------------------------------------------------- the processes of the launcher

    def _accept(self) -> None:
        if rank := self._ranks.accept(self._listener, refuse=self._state == "left"):
            self._events.on_read(rank.lines, partial(self._read, rank))

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
        if not self._ranks.greet(rank, hello, refuse=self._state != "waiting"):
            return
        came = len(self._ranks.by_number)
        if came == (rank.place.local_world_size or 1):
            self._connect()
        elif came == 1:
            self._enter("waiting")
            self._events.after(hello["meeting_seconds"], "other ranks", self._miss_local_ranks)

    def _miss_local_ranks(self) -> None:
        came, first = self._ranks.by_number, self._ranks.first
        self._end_alone(
            EXIT_RESUMABLE,
            f"{len(came)} of {first.place.local_world_size} ranks of {host_name()} came to their node's agent within "
            f"{first.hello['meeting_seconds']:.0f} s: {ranks_text(came)}",
        )

    def _forward(self, rank: Launched, number: int) -> None:
        """Pass a stop signal on. From now on ranks are not started again."""
        if self._state == "spare":  # the others go on without this node
            self._give_node_up({"end": EXIT_RESUMABLE})
            return
        self._stopped = True
        if self._state == "ending" and "failed" in (self._verdict or ()):  # no rank will use what others still compute
            self._ranks.kill_all()
        elif rank.process:
            with suppress(ProcessLookupError):
                os.kill(rank.process, number)
        elif self._state == "meeting":
            self._board.first("roster", {"end": EXIT_RESUMABLE})
        elif self._state in ("waiting", "connecting"):
            self._end_all({"end": EXIT_RESUMABLE})

    def _lose(self, rank: Launched) -> None:
        """Handle the end of a process of the launcher: nobody would get the exit code of its rank."""
        self._events.forget(rank.lines)
        rank.lines.close()
        number, ranks = rank.place.rank, self._ranks.by_number
        if ranks.get(number) is not rank:
            return
        if self._state == "waiting":
            del ranks[number]
        elif self._state != "left":
            self._ranks.kill(rank)
            why = f"rank {number}'s process of the launcher on {host_name()} has ended: the ranks end with it"
            end = {"end": EXIT_RESUMABLE, "error": why}
            if self._spares is not None and self._spares.node and not self._stopped:
                self._give_node_up(end)
            else:
                self._board.first("roster" if self._state == "meeting" else "over", end)
        rank.ended = True
        if self._state == "left":
            self._await_restart()

    # ------------------------------------------------------------------------------------------------ the board

    @property
    def _generation(self) -> int:
        return 0 if self._notices is None else self._notices.generation

    @property
    def _board(self) -> Notices:
        assert self._notices is not None, f"no board while {self._state}"
        return self._notices

    def _connect(self) -> None:
        """Fork the process that calls the store."""
        self._ranks.keep_memory(self._ranks.by_number.keys())  # the launcher may have numbered the ranks anew
        self._notices = Notices(self._ranks.first, self._baseline)
        self._events.on_read(self._notices, partial(self._hear, self._notices))
        self._enter("connecting")
        self._events.after(self._ranks.first.hello["meeting_seconds"] + _STORE_SECONDS, "store", self._lose_board)

    def _hear(self, caller: Notices | Spares) -> None:
        try:
            for message in caller.receive():
                self._see(message)
        except Ended:
            self._events.forget(caller)
            self._lose_board()

    def _see(self, message: Message) -> None:
        """Handle what the board's process has read, but for notices of earlier generations."""
        if "ready" in message and self._state == "connecting":
            self._begin_meetings()
        elif "failed" in message:
            self._end_alone(message["failed"], message["error"])
        elif self._decision is not None and ("silent" in message or "back" in message):
            self._decision.see_beats(message)
        elif message.get("generation") == self._generation:
            kind, value = message["kind"], message["value"]
            if kind == "roster":
                self._see_roster(value)
            elif kind == "over":
                self._see_over(value)
            elif self._decision is not None:
                self._decision.see(kind, value)

    def _lose_board(self) -> None:
        if self._state == "leaving":  # rank 0's agent has left before
            self._events.expire("leave")
        elif self._state != "left":
            why = "the store through which the agents of all nodes meet cannot be reached any more"
            self._end_alone(EXIT_RESUMABLE, why)

    def _close_board(self) -> None:
        callers: tuple[Notices | Spares | None, ...] = (self._notices, self._spares)
        for caller in callers:
            if caller is not None:
                with suppress(KeyError):
                    self._events.forget(caller)
                caller.close()
        self._notices = self._spares = None

    # ------------------------------------------------------------------------------------------------ meeting

    def _begin_meetings(self) -> None:
        """Meet the other agents for the first time."""
        first = self._ranks.first
        if first.hello["spare_nodes"] or first.hello["replica_ranks"]:
            self._spares = Spares(first, self._baseline)
            self._events.on_read(self._spares, partial(self._hear, self._spares))
        if first.place.rank == 0:
            self._decision = Decision(lambda: self._state, self._events, self._board, self._spares, first)
            self._decision.may_replan(self._baseline)
        self._meet()

    def _meet(self) -> None:
        """Tell which ranks are here, for the next generation."""
        self._board.begin()
        self._enter("meeting")
        self._verdict = None
        self._board.watch("roster")
        first = self._board.generation == 1
        seconds = self._ranks.first.hello["meeting_seconds"] if first else _MEETING_SECONDS
        if self._decision is not None:
            self._decision.meet(seconds)
        elif self._spares is not None:
            seconds += _MEETING_SECONDS  # for nodes that rank 0's agent waits for
        lonely = partial(self._end_alone, EXIT_RESUMABLE, "rank 0's agent does not answer")
        missed = lonely if self._decision is None else self._lose_board
        seconds += _ANSWER_SECONDS + self._ranks.first.hello["replanning_seconds"]
        self._events.after(seconds, "roster", missed)
        ranks = list(self._ranks.by_number)
        self._board.add("came", {"ranks": ranks, "stopped": self._stopped, "host": host_name()})

    def _see_roster(self, value: Message) -> None:
        """Start the ranks, or end the run, as has been decided."""
        if self._state != "meeting":  # this node has given itself up
            return
        if "end" in value or self._stopped:
            if "end" not in value:  # the others begin, and would wait for these ranks
                self._board.first("over", {"end": EXIT_RESUMABLE})
            self._leave_together(value if "end" in value else {"end": EXIT_RESUMABLE})
            return
        self._enter("running")
        self._board.watch("over")
        if self._spares is not None:
            trains = self._spares.take_seats(self._ranks.all, value["seats"], value["flags"])
            self._ranks.keep_memory(self._ranks.by_number.keys() if trains else set())
            if not trains:
                self._enter("spare")
                return
        if lost := [rank.place.rank for rank in self._ranks.all if rank.ended]:
            self._board.first("over", {"end": EXIT_RESUMABLE, "error": f"rank {lost[0]} has ended"})
            return
        self._ranks.fork(self._board.generation)

    # ------------------------------------------------------------------------------------------------ running

    def _see_begun(self, step: int) -> None:
        if self._decision is not None:
            self._decision.go_on(step)

    def _see_end(self, rank: Launched, code: int) -> None:
        """Handle the end of a rank."""
        if self._state == "running":
            self._judge(rank, code)
        if self._state == "ending":
            self._end_generation()

    def _judge(self, rank: Launched, code: int) -> None:
        """Say on the board how a rank has ended, unless it has finished."""
        if code == rank.told == EXIT_FINISHED:
            if self._ranks.running:
                self._ranks.end_suspended(self._ranks.first.hello["meeting_seconds"])
            else:
                self._board.add("finished", [each.trains.rank for each in self._ranks.all])
                self._enter("ending")
            return
        word = last_word(rank, code, self._stopped, None if self._spares is None else self._spares.node)
        self._board.first("over", word)
        self._end_ranks(word)

    def _see_over(self, value: Message) -> None:
        """End this node's ranks, because of the first word on the end of this generation."""
        if self._verdict is not None or self._state in ("leaving", "left"):
            return
        self._verdict = value
        if self._state == "running":
            self._end_ranks(value)
        if "failed" in value and self._decision is not None:
            self._decision.fail(value)
        self._end_generation()

    def _end_ranks(self, word: Message) -> None:
        """Kill the ranks that have not ended by themselves some time after the word on the end."""
        self._enter("ending")
        asked = "end" in word and "error" not in word
        seconds = _LAST_SECONDS if asked else word.get("grace", GRACE_SECONDS)
        self._ranks.end_after(seconds, word.get("ranks", ()))

    def _end_generation(self) -> None:
        """Go on once the ranks of this node have ended, and it is known why."""
        if self._ranks.running:
            return
        if self._verdict is None:
            if not all(rank.told == EXIT_FINISHED for rank in self._ranks.all):  # ranks elsewhere may take longer
                self._events.after(self._ranks.first.hello["meeting_seconds"], "verdict", self._lose_board)
        elif "end" in self._verdict:
            self._leave_together(self._verdict)
        else:
            self._meet()

    # ------------------------------------------------------------------------------------------------ the end

    def _give_node_up(self, end: Message) -> None:
        """End this node alone: another one takes its place."""
        if self._state == "running":
            ranks = [rank.trains.rank for rank in self._ranks.all]
            self._board.first("over", {"failed": end["error"], "grace": 0.0, "lost": True, "ranks": ranks})
        self._ranks.kill_all()
        self._enter("leaving")
        self._events.after(_NOTICE_SECONDS, "leave", partial(self._end_alone, end["end"], end.get("error")))

    def _leave_together(self, end: Message) -> None:
        """End the run, once the other agents know of it: the store may end with this process."""
        self._enter("leaving")
        ranks, leave = list(self._ranks.by_number), partial(self._end_all, end)
        if self._decision is None:
            self._board.add("left", ranks)
            self._events.after(_NOTICE_SECONDS, "leave", leave)
        else:
            self._decision.leave(ranks, leave)

    def _end_alone(self, code: int, error: str | None) -> None:
        """End this node, and report the error here, too."""
        self._end_all({"end": code, "error": error, "local": True})

    def _end_all(self, end: Message) -> None:
        """Kill what is left, and give the processes of the launcher their exit code."""
        self._ranks.dismiss(end, self._generation, speaks=self._decision is not None or end.get("local", False))
        self._code = end["end"]
        self._enter("left")
        self._events.after(_ANSWER_SECONDS, "launcher", self._events.stop)
        self._await_restart()

    def _await_restart(self) -> None:
        """Wait for the launcher to start the ranks again, if it may do so, once its processes have ended."""
        if not all(rank.ended for rank in self._ranks.all):
            return
        self._close_board()
        if self._code == EXIT_FINISHED or not self._ranks.may_restart:
            self._events.stop()
        else:
            self._begin_run(_RESTART_SECONDS)


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

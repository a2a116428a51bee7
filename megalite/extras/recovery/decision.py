"""Decision of rank 0's agent on each generation: begin, with which nodes, or end the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from megalite.errors import EXIT_FATAL, EXIT_FINISHED, EXIT_RESUMABLE
from megalite.extras.recovery.events import Action, Events
from megalite.extras.recovery.forks import Launched
from megalite.extras.recovery.lines import Message
from megalite.extras.recovery.notices import Notices
from megalite.extras.recovery.spares import Spares
from megalite.process.place import ranks_text

_WITHOUT_PROGRESS = 3
"""Generations after which the run is given up: all begun after the same step, or in a row and none begun."""
_LEAVING_SECONDS = 5.0  # for the other agents to learn of the end
_HURRY_SECONDS = 60.0  # for nodes that have not come when enough have


class Decision:
    """Knowledge that rank 0's agent has of all nodes and generations, and what it writes on the board because of it."""

    def __init__(
        self, state: Callable[[], str], events: Events, board: Notices, spares: Spares | None, rank: Launched
    ) -> None:
        """Set up. `state`: returns the agent's; `rank`: rank 0, whose process of the launcher says how it goes on."""
        self._state, self._events, self._board, self._spares, self._rank = state, events, board, spares, rank
        self._everyone, self._left = set(range(rank.place.world_size)), set[int]()
        self.history: list[tuple[int, int | None, str]] = []
        """Generations that have failed: the number, the step after which it began (None: it never did), and why."""
        self._why, self._failed_at, self._stopped = "", 0.0, False
        self._forget_generation()

    def may_replan(self, baseline: set[int]) -> None:
        """Have the planner choose another layout where no replica is left, if the run asks for it.

        `baseline`: open files that processes inherit.
        """
        if self._spares is not None and self._rank.hello["replanning_seconds"]:
            from megalite.extras.recovery.replanning import Replanning  # few runs need it

            self._spares.replanning = Replanning(self._rank, baseline, self._events, self._decide_if_complete)

    def _forget_generation(self) -> None:
        self._came, self._finished = set[int](), set[int]()
        self._begun: int | None = None
        self._failure = ""

    def see(self, kind: str, value: Any) -> None:
        """Take a notice of another agent, or of this one."""
        if kind == "came":
            self._come(value)
        elif kind == "finished":
            self._finished.update(value)
            if len(self._finished) == (len(self._everyone) if self._spares is None else self._spares.world_size):
                self._board.first("over", {"end": EXIT_FINISHED})
        elif kind == "left":
            self._left.update(value)
            if self._left >= self._awaited and self._state() == "leaving":
                self._events.expire("leave")

    @property
    def _awaited(self) -> set[int]:
        """Return the launcher's numbers of the ranks that are to come: all, but for those of lost nodes."""
        return self._everyone if self._spares is None else self._everyone - self._spares.absent

    def meet(self, seconds: float) -> None:
        """Begin the meeting for the next generation. `seconds`: how long others may take to come."""
        if self._failure:
            self.history.append((self._board.generation - 1, self._begun, self._failure))
        self._forget_generation()
        self._board.watch("came", "finished")
        self._events.after(seconds, "others", self._miss_others)

    def _come(self, value: Message) -> None:
        """Note that a node has come."""
        self._came.update(value["ranks"])
        self._stopped = self._stopped or value["stopped"]
        if self._spares is not None:
            self._begin_anew(self._spares.growth(self._spares.mark_present(value["ranks"], value["host"])))
            if self._board.generation == 1 and self._spares.are_enough(self._came):
                self._events.hurry(_HURRY_SECONDS, "others")
        self._decide_if_complete()

    def _miss_others(self) -> None:
        """Go on without those that have not come, if spare nodes can take their places, or end the run."""
        missing = self._awaited - self._came
        if self._spares is not None:
            self._spares.mark_absent(missing)
            self._decide_if_complete()
            return
        told = f"{ranks_text(missing)} did not come to generation {self._board.generation}"
        self._board.first("roster", {"end": EXIT_RESUMABLE, "error": f"{told}: their nodes are lost, or cut off"})

    def _decide_if_complete(self) -> None:
        """Say how it goes on, once all nodes that are not lost have come."""
        if self._state() == "meeting" and self._came >= self._awaited and (decided := self._decide()):
            self._board.first("roster", decided)

    def _decide(self) -> Message | None:
        """Return how it goes on; None if a layout has to be chosen first."""
        if self._stopped:
            return {"end": EXIT_RESUMABLE}
        begun = [end for end in self.history if end[1] is not None]
        for latest in (begun[-_WITHOUT_PROGRESS:], self.history[-_WITHOUT_PROGRESS:]):
            steps = {step for _, step, _ in latest}
            if len(latest) == _WITHOUT_PROGRESS and len(steps) == 1:
                step = steps.pop()
                where = "ended before they began to train" if step is None else f"began after step {step} and failed"
                told = "; ".join(f"generation {number}: {why}" for number, _, why in latest)
                own = self._spares is None or self._spares.flags is None  # another layout may be what fails
                code = EXIT_FATAL if own else EXIT_RESUMABLE
                return {"end": code, "error": f"{_WITHOUT_PROGRESS} generations {where}: {told}"}
        return {"begin": True} if self._spares is None else self._fill_seats(self._spares)

    def _fill_seats(self, spares: Spares) -> Message | None:
        """Return which nodes train; or the end of the run, if they are too few; None while a layout is being chosen."""
        if spares.awaits_plan():
            return None
        filled, first = spares.fill(), self._board.generation == 1
        if filled:
            self.history = []  # other nodes may get further
        text = "; ".join(filter(None, [filled, spares.waiting()] if first else [self._why, filled]))
        if missing := spares.missing():
            return {"end": EXIT_RESUMABLE, "error": f"{missing} ({text})"}
        if first:
            self._say(text)
        else:
            self._why = text
        return {"begin": True, "seats": spares.seats.nodes, "flags": spares.flags}

    def go_on(self, step: int) -> None:
        """Note the step after which a rank goes on, and report it if a generation before has failed."""
        if self._begun is not None:
            return
        self._begun = step
        if self._why:
            after = f"went on after step {step}, {time.monotonic() - self._failed_at:.1f} s later"
            self._say(f"generation {self._board.generation}: {self._why}; {after}")

    def fail(self, verdict: Message) -> None:
        """Note why the generation has failed. That a node is lost, or back, is no lack of progress."""
        self._why, self._failed_at = verdict["failed"], time.monotonic()
        self._failure = "" if "lost" in verdict else self._why
        if self._spares is not None:
            self._spares.seats.fail(verdict.get("node"))

    def leave(self, ranks: list[int], leave: Action) -> None:
        """Have this agent leave once all others know of the end of the run: the store may end with this process."""
        self._events.after(_LEAVING_SECONDS, "leave", leave)
        self._board.watch("left")
        self.see("left", ranks)

    def see_beats(self, message: Message) -> None:
        """Take the message that a node is silent, or heard of again."""
        spares = self._spares
        assert spares is not None
        if "silent" in message:
            ranks, name = spares.ranks_on(message["silent"]), spares.mark_lost(message["silent"])
            if ranks:
                self._begin_anew(f"{name} does not answer any more", ranks)
            else:
                self._say(f"{name} does not answer any more; {spares.waiting()}")
            self._decide_if_complete()
        elif message["back"] not in spares.seats.nodes:
            spares.seats.absent.discard(message["back"])
            self._begin_anew(spares.growth(message["back"]))

    def _begin_anew(self, why: str, lost: Sequence[int] = ()) -> None:
        """End a generation that runs, without a fault of its ranks; do nothing without a reason.

        `lost`: the ranks on a lost node.
        """
        if why and self._state() == "running":
            self._board.first("over", {"failed": why, "grace": 0.0, "lost": True, "ranks": lost})

    def _say(self, text: str) -> None:
        self._rank.lines.send({"say": text})

"""Another layout where the nodes that are left hold no replica of the model: a process that the agent forks chooses it.

The agent has one thread, and goes on handling events meanwhile.
"""

from __future__ import annotations

import os
import signal
from functools import partial

from megalite.entry_points import entry_point
from megalite.errors import MegaliteError
from megalite.extras.recovery.events import Action, Events
from megalite.extras.recovery.forks import Caller, Launched, fork_caller
from megalite.extras.recovery.lines import Ended, Lines, Message


class Replanning:
    """Layouts for nodes that are too few for one replica, as rank 0's agent has them chosen.

    Attributes:
        plans: by number of nodes, the layout ("nodes", "flags", "text"), or why there is none ("error").
    """

    def __init__(self, first: Launched, baseline: set[int], events: Events, chosen: Action) -> None:
        """Set up.

        Args:
            first, baseline: as for `fork_caller`.
            events: the agent's.
            chosen: called after a choice.
        """
        self._first, self._baseline = first, baseline
        self._events, self._chosen = events, chosen
        self.plans: dict[int, Message] = {}
        self._caller: Caller | None = None
        self._nodes = 0

    def begin(self, nodes: int) -> None:
        """Start a process that chooses the layout for so many nodes, unless one is running; end one for others."""
        if nodes != self._nodes:
            self.close()
        if self._caller is None:
            self._nodes = nodes
            self._caller = fork_caller(self._first, self._baseline, partial(_choose, nodes))
            self._events.on_read(self._caller.lines, self._read)

    def _read(self) -> None:
        """Take the layout, or the end of the process without one."""
        assert self._caller is not None
        try:
            messages = self._caller.lines.receive()
        except Ended:
            seconds = self._first.hello["replanning_seconds"]
            messages = [{"error": f"the planner has ended without a layout, or took more than {seconds:.0f} s"}]
        if messages:
            self.plans[self._nodes] = messages[0]
            self.close()
            self._chosen()

    def close(self) -> None:
        """End the process."""
        if self._caller is not None:
            self._events.forget(self._caller.lines)
            self._caller.close()
            self._caller = None


def _choose(nodes: int, lines: Lines, first: Launched) -> None:
    """Send the layout for so many nodes, in a process just forked."""
    place, hello = first.place, first.hello
    signal.setitimer(signal.ITIMER_REAL, hello["replanning_seconds"])  # which ends this process
    assert place.local_world_size is not None
    os.chdir(hello["folder"])
    try:
        found = entry_point("replan")(hello["argv"][1:], nodes, place.local_world_size)
    except MegaliteError as error:
        lines.send({"error": str(error)})
        return
    lines.send({"nodes": found.ranks // place.local_world_size, "flags": found.argv, "text": found.text})

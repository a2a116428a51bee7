"""Notices on the board, as an agent writes and reads them: it talks to a process of its own, which calls the store.

Each notice belongs to a generation, and has a kind.
"""

from __future__ import annotations

from typing import Any

from megalite.extras.recovery.forks import Launched, fork_board
from megalite.extras.recovery.lines import Message


class Notices:
    """Connection of an agent to the process that calls the store.

    Attributes:
        generation: number of the generation whose notices are written, 0 before the first one.
    """

    def __init__(self, first: Launched, baseline: set[int]) -> None:
        """Fork the process. `first`: the node's lowest rank; `baseline`: open files that processes inherit."""
        self._caller = fork_board(first, baseline)
        self._lines, self.generation = self._caller.lines, 0

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._lines.fileno()

    def receive(self) -> list[Message]:
        """Return what has come: "ready", "failed", or notices ("generation", "kind", "value").

        Raises Ended when the process has ended.
        """
        return list(map(_notice, self._lines.receive()))

    def begin(self) -> None:
        """Begin the next generation, and look no more for notices of the one before."""
        self._lines.send({"forget": f"{self.generation}/"})
        self.generation += 1

    def watch(self, *kinds: str) -> None:
        """Look for notices of these kinds from now on."""
        for kind in kinds:
            self._lines.send({"watch": f"{self.generation}/{kind}"})

    def first(self, kind: str, value: Message) -> None:
        """Write a notice, of which the first one counts."""
        self._lines.send({"first": f"{self.generation}/{kind}", "value": value})

    def add(self, kind: str, value: Any) -> None:
        """Add a notice to those of a kind."""
        self._lines.send({"add": f"{self.generation}/{kind}", "value": value})

    def close(self) -> None:
        """End the process."""
        self._caller.close()


def _notice(message: Message) -> Message:
    if "seen" not in message:
        return message
    generation, _, kind = message["seen"].partition("/")
    return {"generation": int(generation), "kind": kind, "value": message["value"]}

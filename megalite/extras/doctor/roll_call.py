"""Communication before a process group exists: only through its store, and always with a time limit.

Rank 0 sends a question, receives all answers and decides how to continue. A rank that has ended or is suspended does
not answer in time.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from megalite.errors import CommunicationError
from megalite.lifecycle.rendezvous import connect
from megalite.process.place import Place
from megalite.small_files import parse_json

Result = TypeVar("Result")
_BETWEEN_LOOKS = 0.05
_HASTE = 3.0
"""Seconds that rank 0 still waits after a launcher has requested all ranks to end; the others wait longer, for rank 0's
answer."""


class RollCall:
    """Connection of this rank to the others.

    `stopping` tells whether this process was requested to end: a launcher ends all ranks when one has died. Waiting is
    then cut short, to leave time to report which one. `patience`: seconds that a rank may take to answer.
    """

    def __init__(self, place: Place, patience: float, stopping: Callable[[], object]) -> None:
        """Connect. Raises ConfigurationError without a launcher's variables, CommunicationError if the store does not
        answer."""
        self.rank, self.world_size = place.rank, place.world_size
        self.patience, self.stopping = patience, stopping
        self._mailbox = connect(place, patience, "doctor")

    def gather(self, question: str, answer: object, ranks: Iterable[int], more_seconds: float = 0.0) -> dict[int, Any]:
        """Return, on rank 0, the answers of the `ranks` that answer in time; on other ranks nothing.

        `answer`, this rank's own, is any value that JSON can hold.
        """
        self.publish(f"{question}/{self.rank}", answer)
        if self.rank > 0:
            return {}
        answers = self._mailbox.gather(question, ranks, math.inf, self.limit(more_seconds))
        return {rank: self._mailbox.parsed(f"{question}/{rank}", text, parse_json) for rank, text in answers.items()}

    def publish(self, subject: str, value: object) -> None:
        """Send a value from rank 0 to all others."""
        self._mailbox.put(subject, json.dumps(value))

    def receive(self, subject: str, more_seconds: float = 0.0) -> Any:
        """Return the value that rank 0 sends, after it has waited for all. Raises CommunicationError if none comes."""
        limit = self.limit(self.patience + more_seconds, haste=4 * _HASTE)
        if not self._mailbox.wait([subject], math.inf, limit):
            raise CommunicationError("rank 0, which would give the verdict, does not answer")
        return self._mailbox.parsed(subject, self._mailbox.look(subject) or "", parse_json)

    def limit(self, more_seconds: float = 0.0, haste: float = _HASTE) -> Callable[[], bool]:
        """Return a function that tells whether the time is up, counted from now; `stopping` leaves at most `haste`
        seconds."""
        end = time.monotonic() + self.patience + more_seconds

        def reached() -> bool:
            nonlocal end
            if self.stopping():
                end = min(end, time.monotonic() + haste)
            return time.monotonic() >= end

        return reached

    def wait(self, work: Future[Result], more_seconds: float = 0.0) -> bool:
        """Wait for work on this rank, and tell whether it ended in time."""
        limit = self.limit(more_seconds)
        while not work.done() and not limit():
            time.sleep(_BETWEEN_LOOKS)
        return work.done()

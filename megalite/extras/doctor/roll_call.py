"""Communication before a process group exists: only through its store, and always with a time limit.

Rank 0 sends a question, receives all answers and decides how to continue. A rank that has ended or is suspended does
not answer in time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from megalite.errors import CommunicationError
from megalite.lifecycle.rendezvous import STORE_HANGS, connect, store_name
from megalite.process.bounded import within
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
        self._place = place
        self.rank, self.world_size = place.rank, place.world_size
        self.patience, self.stopping = patience, stopping
        self._store = connect(place, patience, "doctor")

    def gather(self, question: str, answer: object, ranks: Iterable[int], more_seconds: float = 0.0) -> dict[int, Any]:
        """Return, on rank 0, the answers of the `ranks` that answer in time; on other ranks nothing.

        `answer`, this rank's own, is any value that JSON can hold.
        """

        def ask() -> dict[int, Any]:
            self._store.set(f"{question}/{self.rank}", json.dumps(answer))
            if self.rank > 0:
                return {}
            missing, answers = list(ranks), dict[int, Any]()
            limit = self.limit(more_seconds)
            while missing:
                there = [rank for rank in missing if self._store.check([f"{question}/{rank}"])]
                answers |= {rank: self._get(f"{question}/{rank}") for rank in there}
                missing = [rank for rank in missing if rank not in answers]
                if limit():
                    break
                time.sleep(_BETWEEN_LOOKS if missing else 0)
            return dict(sorted(answers.items()))

        return self._with_store(self.patience + more_seconds, ask)

    def publish(self, subject: str, value: object) -> None:
        """Send a value from rank 0 to all others."""
        self._with_store(self.patience, lambda: self._store.set(subject, json.dumps(value)))

    def receive(self, subject: str, more_seconds: float = 0.0) -> Any:
        """Return the value that rank 0 sends, after it has waited for all. Raises CommunicationError if none comes."""

        def wait() -> Any:
            limit = self.limit(self.patience + more_seconds, haste=4 * _HASTE)
            while not self._store.check([subject]):
                if limit():
                    raise CommunicationError("rank 0, which would give the verdict, does not answer")
                time.sleep(_BETWEEN_LOOKS)
            return self._get(subject)

        return self._with_store(2 * self.patience + more_seconds, wait)

    def _get(self, key: str) -> Any:
        """Return a value of the store. Raises CommunicationError if a rank cannot have written it."""
        try:
            return parse_json(self._store.get(key))
        except ValueError as error:
            raise CommunicationError(
                f"something that is not a rank has written to {store_name(self._place)}: {key} is not JSON ({error})"
            ) from error

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

    def _with_store(self, seconds: float, call: Callable[[], Result]) -> Result:
        """Return the result of a call that uses the store, with a limit of `seconds`.

        Raises CommunicationError if the store itself does not answer, for which torch has no time limit.
        """
        try:
            return within(seconds + STORE_HANGS, call)
        except TimeoutError:
            problem = "does not answer: the process that runs it is suspended"
        except RuntimeError as error:
            problem = f"does not answer any more: {error}"
        raise CommunicationError(f"{store_name(self._place)} {problem}")

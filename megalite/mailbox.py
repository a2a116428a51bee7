"""Mailbox of the ranks: texts that they leave for one another in a store of torch.distributed, within time limits.

The protocols that stand on it are the table of docs/architecture.md. Nothing that is read is unpickled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from megalite.errors import CommunicationError
from megalite.process.bounded import Lane
from megalite.small_files import shown

if TYPE_CHECKING:
    from megalite.torch_internals import Store

Result = TypeVar("Result")
_ANSWER_SECONDS = 5.0
_PAUSE, _PAUSE_A_RANK = 0.02, 1e-4  # seconds between looks: all ranks together ask at most 10,000 times a second


@dataclass(frozen=True)
class Mailbox:
    """Texts under keys, which are words, in a store that ranks share.

    Each method raises `error`, which names the store, the key and the time, if the store has gone or does not answer.
    """

    store: Store
    ranks: int  # that may ask at the same time
    answer_seconds: float = _ANSWER_SECONDS
    """Time limit for the store to answer one request. torch has none for a store whose process is suspended."""
    name: str = "the store of the ranks"
    holder: str = "the process"  # that runs the store, for messages
    error: type[CommunicationError] = CommunicationError
    prefix: str = ""
    lane: Lane = field(default_factory=Lane)

    def at_root(self, prefix: str) -> Mailbox:
        """Return a mailbox in the same store that does not wait long, under a prefix in place of all others."""
        store: Any = self.store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return replace(self, store=store, prefix=prefix, answer_seconds=_ANSWER_SECONDS)

    def clone(self) -> Mailbox:
        """Return the same mailbox on a connection of its own: a request does not wait for those of other threads."""
        return replace(self, store=cast(Any, self.store).clone(), lane=Lane())

    def put(self, key: str, text: str) -> None:
        """Leave a text, in place of an older one."""
        self._ask(key, lambda: self.store.set(self.prefix + key, text))

    def first(self, key: str, text: str, instead_of: str = "") -> str:
        """Leave a text, not empty, unless there is one other than `instead_of`; return the one that is there now."""
        there = self._ask(key, lambda: self.store.compare_set(self.prefix + key, instead_of, text))
        return there.decode(errors="replace")

    def add(self, key: str, number: int) -> int:
        """Add to a number, which starts from 0, and return the sum."""
        return self._ask(key, lambda: self.store.add(self.prefix + key, number))

    def look(self, key: str) -> str | None:
        """Return a text, or None if there is none yet."""
        full = self.prefix + key
        found = self._ask(key, lambda: self.store.get(full) if self.store.check([full]) else None)
        return None if found is None else found.decode(errors="replace")

    def get(self, key: str, seconds: float, problem: str) -> str:
        """Wait for a text, without asking again. Raises `error`, which begins with the problem, if none comes in time;
        then this mailbox is of no use any more."""
        full, limit = self.prefix + key, timedelta(seconds=2 * seconds)  # torch prints when its own time is up
        hasty = replace(self, answer_seconds=seconds)
        hasty._ask(key, lambda: self.store.wait([full], limit), problem)
        return hasty._ask(key, lambda: self.store.get(full), problem).decode(errors="replace")

    def gather(self, key: str, ranks: Iterable[int], seconds: float, over: Callable[[], bool] = bool) -> dict[int, str]:
        """Return the texts KEY/RANK of those ranks that have put one in time (`wait`)."""
        there = {rank: f"{key}/{rank}" for rank in ranks}
        if not self.wait(list(there.values()), seconds, over):
            there = {rank: each for rank, each in there.items() if self.wait([each], 0.0)}
        texts = self._ask(key, lambda: self.store.multi_get([self.prefix + each for each in there.values()]))
        return {rank: text.decode(errors="replace") for rank, text in zip(there, texts, strict=True)}

    def wait(self, keys: Sequence[str], seconds: float, over: Callable[[], bool] = bool) -> bool:
        """Tell whether texts are under all keys, within so many seconds and before it is `over`."""
        deadline, full = time.monotonic() + seconds, [self.prefix + key for key in keys]
        while not self._ask("".join(keys[:1]), lambda: self.store.check(full)):
            if time.monotonic() >= deadline or over():
                return False
            time.sleep(max(_PAUSE, _PAUSE_A_RANK * self.ranks))
        return True

    def delete(self, key: str) -> None:
        """Delete a text, if there is one."""
        self._ask(key, lambda: self.store.delete_key(self.prefix + key))

    def parsed(self, key: str, text: str, parse: Callable[[str], Result]) -> Result:
        """Return what a text says. Raises `error` if `parse` refuses it by a ValueError."""
        try:
            return parse(text)
        except ValueError as error:
            raise self.error(
                f"something that is not a rank has written to {self.name}: {key} is {shown(text)} ({str(error)[:100]})"
            ) from error

    def _ask(self, key: str, call: Callable[[], Result], problem: str = "") -> Result:
        """Make a request within the time limit. `problem`: what else it means if no answer comes, for the message."""
        answer, half = self.lane.begin(call), self.answer_seconds / 2
        try:
            with suppress(TimeoutError):  # this half may have gone by while all processes were suspended together
                return answer.result(half)
            return answer.result(half)
        except TimeoutError:
            if problem:
                raise self.error(f"{problem}, for {self.answer_seconds:.0f} s, at {self.name}") from None
            when, cause = "", f"is suspended or cannot be reached (no word for {self.answer_seconds:.0f} s"
        except RuntimeError as error:
            when, cause = " any more", f"ended without a message, or cannot be reached ({str(error).splitlines()[0]}"
        raise self.error(f"{self.name} does not answer{when}: {self.holder}, which runs it, {cause}, on {key!r})")

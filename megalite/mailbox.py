"""Mailbox of the ranks: texts that they leave for one another in a store of torch.distributed, within time limits.

The protocols that stand on it are the table of docs/architecture.md. Nothing that is read is unpickled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from megalite.errors import CommunicationError
from megalite.process.bounded import within
from megalite.small_files import shown

if TYPE_CHECKING:
    from megalite.torch_internals import Store

Result = TypeVar("Result")

MOST_BYTES = 2**20
"""Limit for the size of a text in bytes. torch's own limit is 8 MiB, and a larger text costs the connection."""
_PAUSE, _PAUSE_A_RANK = 0.02, 1e-4  # seconds between looks: all ranks together ask at most 10,000 times a second


@dataclass(frozen=True)
class Mailbox:
    """Texts under keys in a store that ranks share.

    Keys are words, for messages. Each method raises `error`, which names the store, the key and the time, if the store
    has gone or does not answer: torch itself waits for ever for a store whose process is suspended.
    """

    store: Store
    answer_seconds: float
    """Time limit for the store to answer one request."""
    ranks: int
    """Number of ranks that may ask at the same time."""
    name: str = "the store of the ranks"
    holder: str = "the process"
    """Subject of messages: who runs the store."""
    error: type[CommunicationError] = CommunicationError
    prefix: str = ""
    """Prefix of the keys, such as "a run/": others that use the store do not read them."""

    def at_root(self, prefix: str, answer_seconds: float) -> Mailbox:
        """Return a mailbox in the same store, under a prefix in place of all that its keys have."""
        store: Any = self.store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return replace(self, store=store, prefix=prefix, answer_seconds=answer_seconds)

    def clone(self) -> Mailbox:
        """Return the same mailbox on a connection of its own: a request does not wait for those of other threads."""
        return replace(self, store=cast(Any, self.store).clone())

    def put(self, key: str, text: str) -> None:
        """Leave a text, in place of an older one."""
        self._ask(key, lambda: self.store.set(self.prefix + key, self._sized(key, text)))

    def first(self, key: str, text: str, instead_of: str = "") -> str:
        """Leave a text unless there is one, and return the one that is there now. Of many writers, one succeeds.

        Args:
            text: must not be empty.
            instead_of: a text that may be replaced, if there is one.
        """
        sized = self._sized(key, text)
        return self._read(key, self._ask(key, lambda: self.store.compare_set(self.prefix + key, instead_of, sized)))

    def add(self, key: str, number: int) -> int:
        """Add to a number, which starts from 0, and return the sum."""
        return self._ask(key, lambda: self.store.add(self.prefix + key, number))

    def look(self, key: str) -> str | None:
        """Return a text, or None if there is none yet."""
        found = self._ask(key, lambda: self._get([key])[0] if self.store.check([self.prefix + key]) else None)
        return None if found is None else self._read(key, found)

    def get(self, key: str, seconds: float, problem: str, over: Callable[[], bool] = lambda: False) -> str:
        """Wait for a text. Raises `error`, which begins with the problem, if none comes in so many seconds, or before
        it is `over`."""
        began, hasty = time.monotonic(), replace(self, answer_seconds=min(seconds, self.answer_seconds))
        if not self.wait(lambda: hasty._has([key]), seconds, over):
            raise self.error(f"{problem}, for {time.monotonic() - began:.0f} s, at {self.name}")
        return hasty.look(key) or ""

    def has_all(self, key: str, ranks: Iterable[int]) -> bool:
        """Tell whether all the ranks have put KEY/RANK, by one request."""
        return self._has([f"{key}/{rank}" for rank in ranks])

    def missing(self, key: str, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that have not put KEY/RANK."""
        keys = {rank: f"{self.prefix}{key}/{rank}" for rank in ranks}
        return self._ask(key, lambda: [rank for rank, full in keys.items() if not self.store.check([full])])

    def gather(self, key: str, ranks: Iterable[int], seconds: float, over: Callable[[], bool]) -> dict[int, str]:
        """Return the texts KEY/RANK of those ranks that have put one within so many seconds, or before it is `over`."""
        asked = list(ranks)
        missing = set[int]()
        if not self.wait(lambda: self.has_all(key, asked), seconds, over):
            missing = set(self.missing(key, asked))
        there = [rank for rank in asked if rank not in missing]
        texts = self._ask(key, lambda: self._get([f"{key}/{rank}" for rank in there])) if there else []
        return {rank: self._read(f"{key}/{rank}", text) for rank, text in zip(there, texts, strict=True)}

    def wait(self, there: Callable[[], bool], seconds: float, over: Callable[[], bool] = lambda: False) -> bool:
        """Ask until it is there, and tell whether it is. Looks again, because `Store.wait` prints when time is up."""
        deadline = time.monotonic() + seconds
        while not (found := there()) and time.monotonic() < deadline and not over():
            self.pause()
        return found

    def pause(self) -> None:
        """Wait until one may ask again, so that many ranks do not overload the store."""
        time.sleep(max(_PAUSE, _PAUSE_A_RANK * self.ranks))

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

    def _has(self, keys: list[str]) -> bool:
        return self._ask(keys[0] if keys else "", lambda: self.store.check([self.prefix + key for key in keys]))

    def _get(self, keys: list[str]) -> list[bytes]:
        return self.store.multi_get([self.prefix + key for key in keys])

    def _sized(self, key: str, text: str) -> str:
        if len(text.encode()) > MOST_BYTES:
            raise self.error(f"{key} has {len(text):,} characters, and {self.name} takes {MOST_BYTES:,} bytes at most")
        return text

    def _read(self, key: str, text: bytes) -> str:
        if len(text) > MOST_BYTES:
            raise self.error(
                f"something that is not a rank has written to {self.name}: {key} has {len(text):,} bytes, more than "
                f"the {MOST_BYTES:,} of a text"
            )
        return text.decode(errors="replace")

    def _ask(self, key: str, call: Callable[[], Result]) -> Result:
        """Make a request on a key, with the time limit of an answer."""
        try:
            return within(self.answer_seconds, call)
        except TimeoutError:
            raise self.error(
                f"{self.name} does not answer: {self.holder}, which runs it, is suspended or cannot be reached (no "
                f"word on {key!r} for {self.answer_seconds:.0f} s)"
            ) from None
        except RuntimeError as error:
            raise self.error(
                f"{self.name} does not answer any more: {self.holder}, which runs it, ended without a message, or "
                f"cannot be reached ({str(error).splitlines()[0]}, on {key!r})"
            ) from error

"""Rendezvous of the ranks before there is a process group, at a store whose address their launcher gives them."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from megalite.errors import EXIT_RESUMABLE, CommunicationError, RendezvousError
from megalite.lifecycle.failure import code_in
from megalite.process.bounded import aside, within
from megalite.process.host import listen, require_open_files
from megalite.process.place import Place, ranks_text
from megalite.torch_internals import HashStore, PrefixStore, Store, TCPStore

Result = TypeVar("Result")

PATIENCE = 30.0
"""Seconds after which rank 0 reports who has not come, and again after twice as many, and so on."""
STORE_HANGS = 20.0
"""Seconds that the store may take beyond a limit: torch has no limit for a store that hangs."""
PURPOSE = "run"
"""Prefix that separates the keys of a run's ranks from others'."""
SILENCE = 20.0
"""Seconds without a sign after which waiting ranks give up rank 0."""
WORD_SECONDS = 60.0
"""Seconds for which a failed rank waits for the store, and rank 0 keeps the store for ranks that have yet to come."""
_BETWEEN_LOOKS, _BETWEEN_BEATS = 0.05, 1.0
_FILES, _FILES_A_RANK = 24, 2  # that a start opens at least; rank 0 has connections of each rank
_LEAVING_SECONDS = 1.5 * _BETWEEN_BEATS  # rank 0 may have the store, which others are still asking
_CAME, _ALL, _BEATS = "came", "all have come", "rank 0 lives"
_FAILED = "a rank has failed"


def connect(place: Place, seconds: float, purpose: str) -> Store:
    """A connection of its own to the store of this start; a run of one process has a local store.

    Args:
        seconds: for the address to answer, and later for a key to appear.
        purpose: sets its keys apart from those of others.

    Raises:
        CommunicationError: nothing answers there.
        ConfigurationError: this process may not open the files that it takes.
    """
    if place.world_size == 1:
        return HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])  # the place was made of them, too
    first = place.rank == 0 and not hosted_by_launcher()
    timeout = datetime.timedelta(seconds=seconds)

    def open_store() -> Store:
        where = _listen(port) if first else None
        return TCPStore(
            host,
            port,
            is_master=first,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=where,
        )

    require_open_files(_FILES + _FILES_A_RANK * place.world_size)  # on all ranks alike, or some would wait for others
    try:
        store = _opened(aside(open_store), place, seconds + STORE_HANGS)
    except TimeoutError:
        raise CommunicationError(
            f"{store_name()} does not answer: nobody has come there, or the process that has it is stopped"
        ) from None
    except RuntimeError as error:
        raise CommunicationError(f"{store_name()} cannot be reached: {str(error).splitlines()[0]}") from error
    return PrefixStore(f"{purpose}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def open_early(place: Place) -> object:
    """Have rank 0's store take connections from now on, while rank 0 reads its data: a rank that fails meanwhile leaves
    its error there. Returns an object that keeps it open; None on other ranks, or if the launcher has the store."""
    return connect(place, WORD_SECONDS, PURPOSE) if place.rank == 0 and not hosted_by_launcher() else None


def _opened(store: Future[Store], place: Place, seconds: float) -> Store:
    """Wait for a connection to the store; rank 1, and a rank of each node, says so. Raises TimeoutError if it takes
    longer, RuntimeError if it fails."""
    waited = 0.0
    while waited < seconds and not store.done():
        step = min(max(PATIENCE, waited), seconds - waited)
        wait([store], step)
        waited += step
        if waited < seconds and not store.done() and (place.rank == 1 or place.local_rank == 0):
            sys.stderr.write(f"waiting for {store_name()} to open, for {waited:.0f} s by now\n")
    return store.result(0.0)


def _listen(port: int) -> int | None:
    """Open the socket of rank 0's store, for torch to use. Returns None if the port is taken: by this process's own
    store, which torch finds by itself, or by another process, and then torch raises."""
    try:
        return listen("rank 0's store", port).detach()
    except OSError:
        return None


def hosted_by_launcher() -> bool:
    """Tell if the launcher has the store, and not rank 0; torch asks the same."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_name() -> str:
    """Return the name of the store for messages."""
    return f"the store at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} (MASTER_ADDR, MASTER_PORT)"


def wait_for_all_ranks(store: Store, place: Place, seconds: float, watch: Callable[[], bool] = lambda: False) -> None:
    """Return once rank 0 has seen all ranks. Raises RendezvousError on rank 0 if some do not come within `seconds`, and
    on the others if rank 0 does not. If rank 0 reports why, or a rank that has failed does (`tell_failure`), the other
    ranks exit silently.

    `watch` is called before a rank joins, on rank 0 first, so that a rank's later death is detected. It returns True
    if the death of rank 0 will be.
    """
    if place.rank == 0:
        watch()
        _in_time(seconds, "the store does not answer", partial(_come, store, place.rank))
        word = _in_time(seconds, "the store does not answer", partial(_wait_as_host, store, place.world_size, seconds))
        if word:
            _stay(store, place.world_size)
            sys.exit(code_in(word, EXIT_RESUMABLE))
        return
    limit = datetime.timedelta(seconds=2 * (seconds + STORE_HANGS))  # else torch prints that its time is up
    _in_time(seconds, "rank 0 has not come, or stands still", partial(store.wait, [f"{_CAME}/0"], limit))
    watched = _in_time(seconds, "the store does not answer", partial(store.check, [_ALL])) or watch()
    _in_time(seconds, "the store does not answer", partial(_come, store, place.rank))
    word = _in_time(seconds, "rank 0 came, and stands still", partial(_wait_for_host, store, limit, watched))
    if word:
        sys.exit(code_in(word, EXIT_RESUMABLE))


def tell_failure(place: Place, code: int, decide: Callable[[bool], object]) -> int:
    """Tell the ranks that wait at the store that this one has failed and will not come. Returns the exit code of the
    first to say so.

    Args:
        code: this rank's exit code.
        decide: told, as soon as that is known, whether this rank is the first.

    Raises:
        CommunicationError: the store cannot be reached.
        ConfigurationError: this process may not open the files that it takes.
    """
    store = connect(place, WORD_SECONDS, PURPOSE)
    mine = f"{place.rank} {code}"
    said = _in_time(WORD_SECONDS, "the store does not answer", partial(store.compare_set, _FAILED, "", mine))
    first = said.decode(errors="replace")
    decide(first == mine)
    if place.rank == 0:
        store.set(_ALL, first)
    _come(store, place.rank)
    if place.rank == 0:
        _stay(store, place.world_size)
    return code_in(first, EXIT_RESUMABLE)


def _stay(store: Store, world_size: int) -> None:
    """Keep the store, on rank 0, until all ranks have read what was left there, or are unlikely to come any more."""
    end = time.monotonic() + WORD_SECONDS
    while store.add(_CAME, 0) < world_size and time.monotonic() < end:
        time.sleep(_BETWEEN_LOOKS)
    time.sleep(_LEAVING_SECONDS)


def _wait_for_host(store: Store, limit: datetime.timedelta, watched: bool) -> str:
    """Return rank 0's message, empty if all have come. Raises RendezvousError if rank 0 is silent and not `watched`."""
    beats, silence = 0, 0.0  # by this process's own time: it may have stood still together with rank 0
    while not watched and not store.check([_ALL]):
        now = store.add(_BEATS, 0)
        beats, silence = now, silence + _BETWEEN_BEATS if now == beats else 0.0
        if silence > SILENCE:
            raise RendezvousError(
                f"rank 0 came to {store_name()}, and has ended without a word, or stands still: nothing has come of it "
                f"for {SILENCE:.0f} s"
            )
        time.sleep(_BETWEEN_BEATS)
    store.wait([_ALL], limit)
    return store.get(_ALL).decode(errors="replace")


def _come(store: Store, rank: int) -> None:
    store.set(f"{_CAME}/{rank}", "")
    store.add(_CAME, 1)


def _in_time(seconds: float, problem: str, call: Callable[[], Result]) -> Result:
    """Make a call with a time limit. Raises RendezvousError if it takes longer, or the store has gone."""
    patience = seconds + STORE_HANGS
    try:
        return within(patience, call)
    except TimeoutError:
        raise RendezvousError(f"{problem}, for {patience:.0f} s, at {store_name()}") from None
    except RuntimeError as error:
        holder = "its launcher" if hosted_by_launcher() else "rank 0"
        raise RendezvousError(
            f"{store_name()} does not answer any more: {holder}, which has it, has ended without a word, or cannot be "
            f"reached ({str(error).splitlines()[0]})"
        ) from error


def _wait_as_host(store: Store, world_size: int, seconds: float) -> str:
    """Tell the others how it ends, and return it: nothing if all have come, else what the first says that has failed.
    Raises RendezvousError if some have not come in time."""
    began, patience, beats = time.monotonic(), PATIENCE, 0
    while store.add(_CAME, 0) < world_size and not store.check([_FAILED]):
        waited = time.monotonic() - began
        if waited >= beats * _BETWEEN_BEATS:
            beats = store.add(_BEATS, 1)
        if waited > min(seconds, patience):
            missing = [rank for rank in range(world_size) if not store.check([f"{_CAME}/{rank}"])]
            if missing and waited > seconds:
                store.set(_ALL, "no")
                time.sleep(_LEAVING_SECONDS)
                raise RendezvousError(
                    f"{ranks_text(missing)} of {world_size} did not come within {seconds:.0f} s to {store_name()}: "
                    "never started, stopped, ended, or without a way there"
                )
            if missing:
                sys.stderr.write(f"waiting for {ranks_text(missing)} of {world_size}, for {waited:.0f} s by now\n")
                patience *= 2
        time.sleep(_BETWEEN_LOOKS)
    word = store.get(_FAILED).decode(errors="replace") if store.check([_FAILED]) else ""
    store.set(_ALL, word)
    return word

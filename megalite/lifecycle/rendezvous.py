"""Rendezvous of the ranks before there is a process group, through a store at the address that the launcher gives.

Keys of the store: `came/RANK` for each rank that has joined, and `came`, their number. `rank 0 lives` counts rank 0's
heartbeats. `a rank has failed` has the message of the first rank that failed. `all have come` is set by rank 0 when the
rendezvous ends; its value is empty on success, otherwise it says why the rendezvous failed.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from megalite.errors import EXIT_RESUMABLE, CommunicationError, RendezvousError, code_in
from megalite.process.bounded import in_thread, within
from megalite.process.host import listen, require_open_files
from megalite.process.launchers import attempt, hosted_by_launcher
from megalite.process.output import say
from megalite.process.place import Place, ranks_text
from megalite.torch_internals import HashStore, PrefixStore, Store, TCPStore

Result = TypeVar("Result")

PATIENCE = 30.0
"""Seconds after which rank 0 first reports the ranks that are missing. The interval doubles after each report."""
STORE_HANGS = 20.0
"""Seconds that a store operation may take beyond its time limit. torch itself waits for ever for a store that hangs."""
PURPOSE = "run"
"""Prefix of the keys of a run's ranks, which separates them from the keys of other users of the store."""
SILENCE = 20.0
"""Seconds without a heartbeat of rank 0 after which the waiting ranks consider it dead."""
WORD_SECONDS = 60.0
"""Time limit in seconds after a failure: for a failed rank to reach the store, and for rank 0 to keep the store open
so that late ranks can read the failure."""
_BETWEEN_LOOKS, _BETWEEN_BEATS = 0.05, 1.0
_FILES, _FILES_A_RANK = 24, 2  # minimum number of files that a start opens; rank 0 has connections from every rank
_LEAVING_SECONDS = 1.5 * _BETWEEN_BEATS  # rank 0 may host the store, and other ranks may still be reading from it
_CAME, _ALL, _BEATS = "came", "all have come", "rank 0 lives"
_FAILED = "a rank has failed"


def connect(place: Place, seconds: float, purpose: str) -> Store:
    """Open a new connection to the store. A run of one process gets a local store.

    Args:
        seconds: time limit for connecting, and later for waiting for a key.
        purpose: prefix of the keys.

    Raises:
        CommunicationError: the store does not answer.
        ConfigurationError: the limit of open files of this process is too low.
    """
    if place.world_size == 1:
        return HashStore()
    first = place.rank == 0 and not hosted_by_launcher()
    timeout = datetime.timedelta(seconds=seconds)

    def open_store() -> Store:
        where = _listen(place) if first else None
        return TCPStore(
            place.host,
            place.port,
            is_master=first,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=where,
        )

    # The same number on all ranks, although only rank 0 needs so many: otherwise rank 0 would fail alone, and the other
    # ranks would wait for it.
    require_open_files(_FILES + _FILES_A_RANK * place.world_size)
    try:
        store = _opened(in_thread(open_store), place, seconds + STORE_HANGS)
    except TimeoutError:
        raise CommunicationError(
            f"{store_name(place)} does not answer: its process has not started, or is suspended"
        ) from None
    except RuntimeError as error:
        raise CommunicationError(f"{store_name(place)} cannot be reached: {str(error).splitlines()[0]}") from error
    return PrefixStore(f"{purpose}/{attempt()}", store)


def open_early(place: Place) -> object:
    """Open rank 0's store early, so that a rank that fails while rank 0 reads its data can leave its error there.

    Returns an object that keeps the store open; None on other ranks, or if the launcher hosts the store.
    """
    return connect(place, WORD_SECONDS, PURPOSE) if place.rank == 0 and not hosted_by_launcher() else None


def _opened(store: Future[Store], place: Place, seconds: float) -> Store:
    """Wait for a connection to the store. Rank 1 and one rank per node report that they wait.

    Raises TimeoutError if it takes longer than `seconds`, RuntimeError if it fails.
    """
    waited = 0.0
    while waited < seconds and not store.done():
        step = min(max(PATIENCE, waited), seconds - waited)
        wait([store], step)
        waited += step
        if waited < seconds and not store.done() and (place.rank == 1 or place.local_rank == 0):
            say(f"waiting for {store_name(place)} to open, for {waited:.0f} s so far", to_error=True)
    return store.result(0.0)


def _listen(place: Place) -> int | None:
    """Open the socket of rank 0's store and return its file descriptor, for torch to use.

    Returns None if the port is in use. If this process's own store uses it, torch finds that store by itself. If
    another process uses it, torch raises an error.
    """
    try:
        return listen("rank 0's store", place, place.port).detach()
    except OSError:
        return None


def store_name(place: Place) -> str:
    """Return a name of the store for messages."""
    return f"the store at {place.host}:{place.port} (MASTER_ADDR, MASTER_PORT)"


def wait_for_all_ranks(store: Store, place: Place, seconds: float, watch: Callable[[], bool] = lambda: False) -> None:
    """Wait until rank 0 has seen all ranks.

    If rank 0 or a failed rank (`publish_failure`) has reported the failure, the other ranks exit silently.

    Args:
        watch: called before a rank joins, on rank 0 first: from then on the death of a rank is detected. Returns True
            if the death of rank 0 will be detected.

    Raises:
        RendezvousError: on rank 0, some ranks did not come within `seconds`; on the others, rank 0 did not come or
            does not respond.
    """
    if place.rank == 0:
        watch()
        _in_time(place, seconds, "the store does not answer", partial(_check_in, store, place.rank))
        word = _in_time(place, seconds, "the store does not answer", partial(_wait_as_host, store, place, seconds))
        if word:
            _linger(store, place.world_size)
            sys.exit(code_in(word, EXIT_RESUMABLE))
        return
    limit = datetime.timedelta(seconds=2 * (seconds + STORE_HANGS))  # longer than ours: torch prints on its time-out
    _in_time(place, seconds, "rank 0 has not connected, or hangs", partial(store.wait, [f"{_CAME}/0"], limit))
    watched = _in_time(place, seconds, "the store does not answer", partial(store.check, [_ALL])) or watch()
    _in_time(place, seconds, "the store does not answer", partial(_check_in, store, place.rank))
    meet = partial(_wait_for_host, store, place, limit, watched)
    word = _in_time(place, seconds, "rank 0 connected, but hangs", meet)
    if word:
        sys.exit(code_in(word, EXIT_RESUMABLE))


def publish_failure(place: Place, code: int, decide: Callable[[bool], object]) -> int:
    """Report in the store that this rank has failed, for the ranks that wait there.

    Args:
        code: this rank's exit code.
        decide: called as soon as it is known which rank failed first, with True if it is this rank.

    Returns:
        The exit code of the first rank that failed.

    Raises:
        CommunicationError: the store cannot be reached.
        ConfigurationError: the limit of open files of this process is too low.
    """
    store = connect(place, WORD_SECONDS, PURPOSE)
    mine = f"{place.rank} {code}"
    said = _in_time(place, WORD_SECONDS, "the store does not answer", partial(store.compare_set, _FAILED, "", mine))
    first = said.decode(errors="replace")
    decide(first == mine)
    if place.rank == 0:
        store.set(_ALL, first)
    _check_in(store, place.rank)
    if place.rank == 0:
        _linger(store, place.world_size)
    return code_in(first, EXIT_RESUMABLE)


def _linger(store: Store, world_size: int) -> None:
    """Keep rank 0's store open until all ranks have read the message in it, at most `WORD_SECONDS`."""
    end = time.monotonic() + WORD_SECONDS
    while store.add(_CAME, 0) < world_size and time.monotonic() < end:
        time.sleep(_BETWEEN_LOOKS)
    time.sleep(_LEAVING_SECONDS)


def _wait_for_host(store: Store, place: Place, limit: datetime.timedelta, watched: bool) -> str:
    """Return rank 0's message, which is empty if all ranks have come.

    Raises RendezvousError if rank 0 sends no heartbeats. If it is `watched`, the watchdog detects its death instead.
    """
    # Counts turns of this loop, not clock time: if this process was suspended together with rank 0, no time is counted.
    beats, silence = 0, 0.0
    while not watched and not store.check([_ALL]):
        now = store.add(_BEATS, 0)
        beats, silence = now, silence + _BETWEEN_BEATS if now == beats else 0.0
        if silence > SILENCE:
            raise RendezvousError(
                f"rank 0 connected to {store_name(place)}, but then ended without a message, or hangs: no sign of it "
                f"for {SILENCE:.0f} s"
            )
        time.sleep(_BETWEEN_BEATS)
    store.wait([_ALL], limit)
    return store.get(_ALL).decode(errors="replace")


def _check_in(store: Store, rank: int) -> None:
    store.set(f"{_CAME}/{rank}", "")
    store.add(_CAME, 1)


def _in_time(place: Place, seconds: float, problem: str, call: Callable[[], Result]) -> Result:
    """Make a call with a time limit. Raises RendezvousError if the limit passes or the store cannot be reached."""
    patience = seconds + STORE_HANGS
    try:
        return within(patience, call)
    except TimeoutError:
        raise RendezvousError(f"{problem}, for {patience:.0f} s, at {store_name(place)}") from None
    except RuntimeError as error:
        holder = "its launcher" if hosted_by_launcher() else "rank 0"
        raise RendezvousError(
            f"{store_name(place)} does not answer any more: {holder}, which runs it, ended without a message, or "
            f"cannot be reached ({str(error).splitlines()[0]})"
        ) from error


def _wait_as_host(store: Store, place: Place, seconds: float) -> str:
    """Wait on rank 0 for all ranks, and publish the result to them.

    Returns an empty string if all ranks have come, otherwise the message of the first rank that failed. Raises
    RendezvousError if ranks are missing after `seconds`.
    """
    world_size = place.world_size
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
                    f"{ranks_text(missing)} of {world_size} did not connect within {seconds:.0f} s to "
                    f"{store_name(place)}: never started, suspended, ended, or without a network route to it"
                )
            if missing:
                say(f"waiting for {ranks_text(missing)} of {world_size}, for {waited:.0f} s so far", to_error=True)
                patience *= 2
        time.sleep(_BETWEEN_LOOKS)
    word = store.get(_FAILED).decode(errors="replace") if store.check([_FAILED]) else ""
    store.set(_ALL, word)
    return word

"""Rendezvous of the ranks before there is a process group, through a store at the address that the launcher gives.

Keys of its mailbox: `came/RANK` for each rank that has joined. `rank 0 lives` counts rank 0's heartbeats. `a rank has
failed` has the message of the first rank that failed. `all have come` is set by rank 0 when the rendezvous ends; its
value is empty on success, otherwise it says why the rendezvous failed.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from megalite.errors import EXIT_RESUMABLE, CommunicationError, FailedElsewhere, RendezvousError, code_in
from megalite.mailbox import Mailbox
from megalite.process.bounded import in_thread
from megalite.process.host import listen, require_open_files
from megalite.process.launchers import attempt, hosted_by_launcher
from megalite.process.output import say
from megalite.process.place import Place, ranks_text
from megalite.torch_internals import HashStore, PrefixStore, Store, TCPStore

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
_BETWEEN_BEATS = 1.0
_FILES, _FILES_A_RANK = 24, 2  # minimum number of files that a start opens; rank 0 has connections from every rank
_LEAVING_SECONDS = 1.5 * _BETWEEN_BEATS  # rank 0 may host the store, and other ranks may still be reading from it
_CAME, _ALL, _BEATS = "came", "all have come", "rank 0 lives"
_FAILED = "a rank has failed"


def connect(place: Place, seconds: float, purpose: str) -> Mailbox:
    """Open a new connection to the store. A run of one process gets a local store.

    Args:
        seconds: time limit for connecting, and later for an answer of the store.
        purpose: prefix of the keys.

    Raises:
        CommunicationError: the store does not answer.
        ConfigurationError: the limit of open files of this process is too low.
    """
    if place.world_size == 1:
        return Mailbox(HashStore(), 1, seconds, store_name(place), error=RendezvousError)
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
    holder = "its launcher" if hosted_by_launcher() else "rank 0"
    store = PrefixStore(f"{purpose}/{attempt()}", store)
    return Mailbox(store, place.world_size, seconds + STORE_HANGS, store_name(place), holder, RendezvousError)


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


def wait_for_all_ranks(mailbox: Mailbox, place: Place, seconds: float, watch: Callable[[], bool] = bool) -> None:
    """Wait until rank 0 has seen all ranks.

    If rank 0 or a failed rank (`publish_failure`) has reported the failure, the other ranks exit silently
    (FailedElsewhere).

    Args:
        watch: called before a rank joins, on rank 0 first: from then on the death of a rank is detected. Returns True
            if the death of rank 0 will be detected.

    Raises:
        RendezvousError: on rank 0, some ranks did not come within `seconds`; on the others, rank 0 did not come or
            does not respond.
    """
    if place.rank == 0:
        watch()
        _check_in(mailbox, place.rank)
        word = _wait_as_host(mailbox, place, seconds)
        if word:
            _linger(mailbox, place.world_size)
    else:
        limit = seconds + STORE_HANGS
        mailbox.get(f"{_CAME}/0", limit, "rank 0 has not connected, or hangs")
        watched = mailbox.look(_ALL) is not None or watch()
        _check_in(mailbox, place.rank)
        word = _wait_for_host(mailbox, limit, watched)
    if word:
        raise FailedElsewhere(code_in(word, EXIT_RESUMABLE))


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
    mailbox = connect(place, WORD_SECONDS, PURPOSE)
    mine = f"{place.rank} {code}"
    first = mailbox.first(_FAILED, mine)
    decide(first == mine)
    if place.rank == 0:
        mailbox.put(_ALL, first)
    _check_in(mailbox, place.rank)
    if place.rank == 0:
        _linger(mailbox, place.world_size)
    return code_in(first, EXIT_RESUMABLE)


def _linger(mailbox: Mailbox, world_size: int) -> None:
    """Keep rank 0's store open until all ranks have read the message in it, at most `WORD_SECONDS`."""
    mailbox.wait([f"{_CAME}/{rank}" for rank in range(world_size)], WORD_SECONDS)
    time.sleep(_LEAVING_SECONDS)


def _wait_for_host(mailbox: Mailbox, seconds: float, watched: bool) -> str:
    """Return rank 0's message, which is empty if all ranks have come.

    Raises RendezvousError if rank 0 sends no heartbeats. If it is `watched`, the watchdog detects its death instead.
    """
    # Counts turns of this loop, not clock time: if this process was suspended together with rank 0, no time is counted.
    beats, silence = 0, 0.0
    while not watched and mailbox.look(_ALL) is None:
        now = mailbox.add(_BEATS, 0)
        beats, silence = now, silence + _BETWEEN_BEATS if now == beats else 0.0
        if silence > SILENCE:
            raise RendezvousError(
                f"rank 0 connected to {mailbox.name}, but then ended without a message, or hangs: no sign of it for "
                f"{SILENCE:.0f} s"
            )
        time.sleep(_BETWEEN_BEATS)
    return mailbox.get(_ALL, seconds, "rank 0 connected, but hangs")


def _check_in(mailbox: Mailbox, rank: int) -> None:
    mailbox.put(f"{_CAME}/{rank}", "")


def _wait_as_host(mailbox: Mailbox, place: Place, seconds: float) -> str:
    """Wait on rank 0 for all ranks, and publish the result to them.

    Returns an empty string if all ranks have come, otherwise the message of the first rank that failed. Raises
    RendezvousError if ranks are missing after `seconds`.
    """
    world_size = place.world_size
    began, patience, beats = time.monotonic(), PATIENCE, 0

    def failed() -> bool:
        nonlocal beats
        if time.monotonic() - began >= beats * _BETWEEN_BEATS:
            beats = mailbox.add(_BEATS, 1)
        return mailbox.look(_FAILED) is not None

    while True:
        left = began + min(seconds, patience) - time.monotonic()
        missing = set(range(world_size)) - mailbox.gather(_CAME, range(world_size), left, failed).keys()
        if not missing or failed():
            break
        waited = time.monotonic() - began
        if waited >= seconds:
            mailbox.put(_ALL, "no")
            time.sleep(_LEAVING_SECONDS)
            raise RendezvousError(
                f"{ranks_text(missing)} of {world_size} did not connect within {seconds:.0f} s to "
                f"{mailbox.name}: never started, suspended, ended, or without a network route to it"
            )
        say(f"waiting for {ranks_text(missing)} of {world_size}, for {waited:.0f} s so far", to_error=True)
        patience *= 2
    word = mailbox.look(_FAILED) or ""
    mailbox.put(_ALL, word)
    return word

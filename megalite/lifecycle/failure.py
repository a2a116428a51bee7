"""Reporting of an error on any number of ranks: one message and one exit code.

Every rank that fails calls `_fail`. With a process group, the group's own store decides which rank reports: the lowest
rank that failed, once. Ranks that fail afterwards, because a peer has left, print nothing and end with the same code.
Without a group (yet), a launcher of one machine decides: rank 0 reports at once, and the others wait for the launcher
to end them, which it does when rank 0 has ended; if nothing ends them, the error was theirs alone, and they report it.
Elsewhere ranks leave a message at the store where others wait for them (rendezvous.py), and the first rank to do so
reports.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, NoReturn

from megalite.atomic_files import write_at_once
from megalite.errors import EXIT_CONFIGURATION, EXIT_INTERNAL, EXIT_RESUMABLE, FileError, MegaliteError, exit_code_of
from megalite.process.bounded import aside, within
from megalite.process.host import on_one_machine, too_many_open_files
from megalite.process.output import require_streams, write_out
from megalite.process.place import Place
from megalite.process.signals import STOP_SIGNALS, exit_on_stop_signals, ignore_stop_signals

if TYPE_CHECKING:
    from megalite.torch_internals import Store

_LOWEST, _REPORT = "lowest_rank", "report"
_NO_RANK = -1
_GATHERING_SECONDS = 0.5  # ranks that fail of the same cause arrive within this time
_LAUNCHER_SECONDS = 10.0  # ranks come to the same error, and a launcher ends the others, within this time
_STAGGER_SECONDS = 0.5
_STORE_SECONDS = 5.0  # for the store's answer
_SPEAKING = RLock()  # a thread that reports what it has found must come to its end before the process does


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run the program and exit with the code it returns, or with the code of its error (megalite/errors.py).

    A MegaliteError is for the person at the screen: its message alone. Anything else is a defect: a traceback.

    Launchers make 1 of every code but 0: one rank writes it into the file MEGALITE_EXIT_FILE, where that is set.
    """
    require_streams()
    exit_on_stop_signals()
    try:
        code = main()
        ignore_stop_signals()
        problem = write_out()
        if isinstance(problem, BrokenPipeError):
            raise problem
        if problem is not None:
            raise FileError(f"the output cannot be written ({problem.strerror}): a part of it is lost")
        if os.environ.get("RANK", "0") == "0":
            leave_code(code)
    except SystemExit as ending:  # has said what there is to say, like --help
        ignore_stop_signals()
        if isinstance(ending.code, int):
            if ending.code == EXIT_CONFIGURATION:  # and not that of a signal, which has another cause
                leave_code(ending.code)
            _exit(ending.code)
        raise
    except BrokenPipeError:
        _fail("interrupted: nobody reads the output any more", EXIT_RESUMABLE)
    except BaseException as error:
        _fail(_describe(error), exit_code_of(error))
    sys.exit(code)


def _describe(error: BaseException) -> str:
    """Return the message of an error, without the place where it happened."""
    if isinstance(error, MegaliteError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{too_many_open_files(str(error))}\n{_innermost(error)}"
    if isinstance(error, ModuleNotFoundError):
        return f"{error}: install what the program needs with `pip install -e .` in its folder"
    if type(error).__name__ == "OutOfMemoryError":  # torch's: it may not be imported
        return (
            f"{error}\nA training takes less with a smaller --micro-batch-size, with --recompute-granularity full, or "
            f"split over more ranks; --record-memory-history tells what takes it.\n{_innermost(error)}"
        )
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return f"this machine is out of memory: {error}\n{_innermost(error)}"
    trace = "".join(traceback.format_exception(error))
    return f"a defect in megalite or below it, please report it:\n{trace.rstrip()}"


def _innermost(error: BaseException) -> str:
    """Return the place where the error was raised: the last lines of its traceback before the message."""
    return "".join(traceback.format_tb(error.__traceback__)[-1:]).rstrip()


def _fail(message: str, code: int) -> NoReturn:
    # From here on a launcher may end this process at once.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(code))
    place = _own_place()
    store = default_store()
    if store is not None and place.world_size > 1:
        try:
            within(_STORE_SECONDS, partial(store.check, [_REPORT]))
            code = _agree(store, message, code, place.rank)
        except (RuntimeError, TimeoutError, ValueError):  # the store has gone, stands still, or holds what is not ours
            _speak_unless_ended(message, code, place)
    elif place.world_size > 1 and not _ended_by_launcher() and code != EXIT_RESUMABLE:
        code = _leave_word(message, code, place)
    else:
        _speak_unless_ended(message, code, place)
    _exit(code)


def _ended_by_launcher() -> bool:
    """Tell whether the launcher ends all ranks once one has ended, as torchrun does on one machine."""
    return "TORCHELASTIC_RUN_ID" in os.environ and on_one_machine()


def _leave_word(message: str, code: int, place: Place) -> int:
    """Tell the ranks that would wait for this one, and report the error unless another rank failed earlier.

    Returns the exit code of the rank that failed first.
    """
    speak = cache(partial(_speak, message, code, place.rank))  # once, whoever asks for it
    try:
        from megalite.lifecycle.rendezvous import WORD_SECONDS, tell_failure

        is_first: Future[Any] = Future()
        telling: Future[Any] = aside(lambda: tell_failure(place, code, is_first.set_result))
        wait([is_first, telling], _LAUNCHER_SECONDS, return_when=FIRST_COMPLETED)
        if not is_first.done() or is_first.result():  # where rank 0 has not come yet, too
            speak()
        said: int = telling.result(3 * WORD_SECONDS)
        return said
    except Exception:  # whatever it is: that nobody can be told of the failure is no reason to say nothing of its cause
        speak()
        return code


def _own_place() -> Place:
    """Return this process's place by the launcher's variables; unusable values count as rank 0, local rank 0, world
    size 1."""
    texts = (os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    rank, local_rank, world_size = (int(text) if text.isdecimal() else None for text in texts)
    return Place(rank or 0, local_rank or 0, world_size or 1)


def _exit(code: int) -> NoReturn:
    if default_store() is None:
        sys.exit(code)
    # A process group may hang in its destructors if its peers have gone.
    write_out()
    _SPEAKING.acquire(timeout=_LAUNCHER_SECONDS)
    os._exit(code)


def _agree(store: Store, message: str, code: int, rank: int) -> int:
    """Report, unless a lower rank does or another rank has done so. Returns the exit code of the one reported."""
    lowest = int(store.compare_set(_LOWEST, "", str(rank)))
    while lowest > rank:
        lowest = int(store.compare_set(_LOWEST, str(lowest), str(rank)))
    _wait_for_report(store, _GATHERING_SECONDS)
    if int(store.get(_LOWEST)) < rank:
        _wait_for_report(store, _LAUNCHER_SECONDS)
    mine = f"{rank} {code}"
    reported = store.compare_set(_REPORT, "", mine).decode(errors="replace")
    if reported == mine:
        _speak(message, code, rank)
    if rank == 0:  # which may hold the store: others are still asking
        time.sleep(_GATHERING_SECONDS)
    return code_in(reported, EXIT_INTERNAL)


def report(store: Store | None, message: str, code: int) -> int:
    """Report what a rank cannot report itself, such as being killed, unless a rank has reported something.

    Returns the exit code of the report. `store` is any that the ranks share: a connection of its own.
    """
    store = None if store is None else _of_failures(store)
    mine = f"{_NO_RANK} {code} {secrets.token_hex(8)}"
    with _SPEAKING:
        if store is not None:
            with suppress(RuntimeError, TimeoutError):  # as above
                first = within(_STORE_SECONDS, lambda: store.compare_set(_REPORT, "", mine)).decode(errors="replace")
                if first != mine:
                    return code_in(first, EXIT_INTERNAL)
        _speak(message, code, rank=0)
    return code


def code_in(word: str, otherwise: int) -> int:
    """Return the exit code in a rank's message, "RANK CODE"; `otherwise` if no rank can have written the message."""
    code = word.split(" ")[1:2]
    return int(code[0]) if code and re.fullmatch(r"[1-9]\d?\d?", code[0], re.ASCII) else otherwise


def _wait_for_report(store: Store, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not store.check([_REPORT]):
        time.sleep(0.05)  # the store's own wait prints warnings of torch's when its time is up


def _speak_unless_ended(message: str, code: int, place: Place) -> None:
    if place.rank > 0:
        # One rank of each node at a time, so that its launcher ends the others before they speak.
        time.sleep(_LAUNCHER_SECONDS + _STAGGER_SECONDS * place.local_rank)
    _speak(message, code, place.rank)


def _speak(message: str, code: int, rank: int) -> None:
    leave_code(code)
    where = f" on rank {rank}" if rank else ""
    write_out()
    with suppress(OSError):
        sys.stderr.write(f"error{where}: {message}\n")
        sys.stderr.flush()


def leave_code(code: int) -> None:
    """Leave the exit code for the program that started the launcher.

    The first code stays: those of other ranks are consequences.
    """
    path = os.environ.get("MEGALITE_EXIT_FILE")
    if path and not Path(path).exists():
        with suppress(FileError, OSError):
            write_at_once(Path(path), f"{code}\n".encode())


def default_store() -> Store | None:
    """Return the process group's store for failures, or None without a group; torch is not imported for this."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    from megalite import torch_internals

    return _of_failures(torch_internals.default_store())


def _of_failures(store: Store) -> Store:
    """Return the part of the ranks' store that is for failures, whichever part of the store is given."""
    from megalite.torch_internals import PrefixStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return PrefixStore(f"megalite/failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

"""Error reporting: one message and one exit code, however many ranks fail.

`run_main` runs a program of several ranks, and `run_tool` one of a single process. Every rank that fails calls `_fail`.
There are three cases:

- With a process group, its store decides which rank reports: the lowest rank that failed. Ranks that fail later,
  because a peer has ended, print nothing and exit with the same code.
- Before there is a group, under a launcher on one machine: rank 0 reports at once. The other ranks wait, because the
  launcher ends them after rank 0 has ended. If it does not, the error is theirs alone, and they report it.
- Before there is a group, otherwise: ranks leave a message at the store where the others wait (rendezvous.py), and the
  first rank to do so reports.
"""

from __future__ import annotations

import errno
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, NoReturn

from megalite.atomic_files import write_at_once
from megalite.entry_points import entry_point
from megalite.errors import (
    EXIT_FINISHED,
    EXIT_INTERNAL,
    EXIT_RESUMABLE,
    CommunicationError,
    FailedElsewhere,
    FileError,
    MegaliteError,
    code_in,
    exit_code_of,
)
from megalite.lifecycle.out_of_memory import describe_out_of_memory, innermost, is_out_of_memory
from megalite.lifecycle.torchrun_record import record
from megalite.process.bounded import in_thread
from megalite.process.host import too_many_open_files
from megalite.process.launchers import GENERATION, attempt
from megalite.process.names import as_installed
from megalite.process.output import require_streams, say, write_out
from megalite.process.place import Place, place_or_alone
from megalite.process.signals import STOP_SIGNALS, exit_on_stop_signals, ignore_stop_signals, last_words

if TYPE_CHECKING:
    from megalite.mailbox import Mailbox

_LOWEST, _REPORT = "lowest_rank", "report"
_NO_RANK = -1
_GATHERING_SECONDS = 0.5  # ranks that fail for the same reason arrive within this time
_LAUNCHER_SECONDS = 10.0  # within this time ranks get the same error, and a launcher ends the other ranks
_STAGGER_SECONDS = 0.5
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_SPEAKING = RLock()  # held while a thread reports an error: the process must not end before it has finished


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run the program and exit with the code that it returns, or with the exit code of its error (megalite/errors.py).

    Of a MegaliteError only the message is printed. Any other error is a defect and is printed with its traceback.

    Launchers replace every exit code other than 0 by 1. So one rank also writes the code to the file that the variable
    MEGALITE_EXIT_FILE names, if it is set.
    """
    require_streams()
    exit_on_stop_signals()
    last_words(partial(write_exit_code, EXIT_RESUMABLE))
    try:
        with _output_written():
            code = main()
            ignore_stop_signals()
        _tell_end(code)
        if place_or_alone().rank == 0:
            write_exit_code(code)
    except SystemExit as ending:  # its message has been printed already, for example by --help
        ignore_stop_signals()
        if isinstance(ending.code, int):
            if not isinstance(ending, FailedElsewhere):  # this rank does not end on purpose
                _tell_end(ending.code)
            if ending.code != EXIT_FINISHED:
                write_exit_code(ending.code)  # also after a stop signal: a rank that caused it has left its own code
            _exit(ending.code)
        raise
    except BrokenPipeError:
        _fail("interrupted: nobody reads the output any more", EXIT_RESUMABLE)
    except BaseException as error:
        _fail(_describe(error), exit_code_of(error))
    sys.exit(code)


def _tell_end(code: int) -> None:
    """Tell the agent that restarts ranks, if there is one, that this rank ends on purpose."""
    if GENERATION in os.environ:
        entry_point("generation")().tell_end(code)


def report_uncaught() -> None:
    """Have errors that end the program reported as by `run_main`, for a program that is not a function.

    Stop signals end the program from now on.
    """
    exit_on_stop_signals()
    stream = sys.stderr

    def fail(kind: type[BaseException], error: BaseException, trace: object) -> None:
        sys.stderr = stream  # torch.distributed collects the output of this function, and would never print it
        _fail(_describe(error, "the program ended by an error"), exit_code_of(error))  # whose, the traceback tells

    sys.excepthook = fail


def run_tool(main: Callable[[], None]) -> None:
    """Run a program of a single process. An error ends it with a message and an exit code.

    Ctrl-C, SIGTERM and the end of the output's reader, for example `| head`, end it as shells expect: with 128 and the
    number of the signal.
    """
    require_streams()
    # SIGTERM raises an exception, as Ctrl-C does, so that temporary files are removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with _output_written():
            main()
    except SystemExit:
        raise
    except KeyboardInterrupt:
        say("interrupted", to_error=True)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        write_out()
        sys.exit(128 + signal.SIGPIPE)
    except BaseException as error:
        write_out()
        say(f"error: {as_installed(_describe(error))}", to_error=True)
        sys.exit(exit_code_of(error))


@contextmanager
def _output_written() -> Iterator[None]:
    """Write the buffered output at the end of the block.

    Raises BrokenPipeError if nobody reads it any more, and FileError if the disk is full, whenever this is noticed.
    """
    try:
        try:
            yield
        except SystemExit:  # for example after --help
            if (problem := write_out()) is None:
                raise
        else:
            problem = write_out()
    except OSError as error:
        if error.errno not in _DISK_FULL or error.filename is not None:
            raise
        problem = error
    if isinstance(problem, BrokenPipeError):
        raise problem
    if problem is not None:
        write_out()
        raise FileError(f"the output cannot be written ({problem.strerror}): a part of it is lost")


def _describe(error: BaseException, otherwise: str = "a defect in megalite or a library, please report it") -> str:
    """Return the message for an error, without the rank. `otherwise`: text above the traceback of an unknown error."""
    if isinstance(error, MegaliteError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{too_many_open_files(str(error))}\n{innermost(error)}"
    if isinstance(error, ModuleNotFoundError):
        return f"{error}: install what the program needs with `pip install -e .` in its folder"
    if is_out_of_memory(error):
        return describe_out_of_memory(error)
    trace = "".join(traceback.format_exception(error))
    return f"{otherwise}:\n{trace.rstrip()}"


def _fail(message: str, code: int) -> NoReturn:
    """End this process with an error's message, printed once by the lowest failing rank, and with its exit code."""
    # From now on a stop signal of the launcher ends this process at once, with this error's exit code.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(code))
    place = place_or_alone()
    torchrun_ends_all = "TORCHELASTIC_RUN_ID" in os.environ and place.on_one_machine  # after one rank has ended
    mailbox = default_mailbox()
    if mailbox is not None and place.world_size > 1:
        try:
            code = _agree(mailbox, message, code, place.rank)
        except (CommunicationError, ValueError):  # the store is gone, hangs, or has values that are not ours
            _report_after_delay(message, code, place)
    elif place.world_size > 1 and not torchrun_ends_all and code != EXIT_RESUMABLE:
        code = _post_failure(message, code, place)
    else:
        _report_after_delay(message, code, place)
    _exit(code)


def _post_failure(message: str, code: int, place: Place) -> int:
    """Leave a message for the ranks that would wait for this one. Report the error unless another rank failed earlier.

    Returns the exit code of the rank that failed first.
    """
    speak = cache(partial(_speak, message, code, place.rank))  # prints only once, however often it is called
    try:
        from megalite.lifecycle.rendezvous import WORD_SECONDS, publish_failure

        is_first: Future[Any] = Future()
        telling: Future[Any] = in_thread(lambda: publish_failure(place, code, is_first.set_result))
        wait([is_first, telling], _LAUNCHER_SECONDS, return_when=FIRST_COMPLETED)
        if not is_first.done() or is_first.result():  # also if the store is not open yet, because rank 0 is late
            speak()
        said: int = telling.result(3 * WORD_SECONDS)
        return said
    except Exception:  # the error must be reported even if the message cannot be left, for whatever reason
        speak()
        return code


def _exit(code: int) -> NoReturn:
    if default_mailbox() is None:
        sys.exit(code)
    # `os._exit`, because the destructors of a process group may hang if its peers have ended.
    write_out()
    _SPEAKING.acquire(timeout=_LAUNCHER_SECONDS)
    os._exit(code)


def _agree(mailbox: Mailbox, message: str, code: int, rank: int) -> int:
    """Report the error, unless a lower rank reports or another rank has reported. Returns the reported exit code."""
    lowest = int(mailbox.first(_LOWEST, str(rank)))
    while lowest > rank:
        lowest = int(mailbox.first(_LOWEST, str(rank), instead_of=str(lowest)))
    mailbox.wait([_REPORT], _GATHERING_SECONDS)
    if int(mailbox.look(_LOWEST) or rank) < rank:
        mailbox.wait([_REPORT], _LAUNCHER_SECONDS)
    mine = f"{rank} {code}"
    reported = mailbox.first(_REPORT, mine)
    if reported == mine:
        _speak(message, code, rank)
    if rank == 0:  # it may host the store, from which other ranks are still reading
        time.sleep(_GATHERING_SECONDS)
    return code_in(reported, EXIT_INTERNAL)


def report(mailbox: Mailbox | None, message: str, code: int) -> int:
    """Report an error on behalf of a rank that cannot, for example because it was killed, unless a rank has reported.

    Args:
        mailbox: any that the ranks share, on a connection that no other thread uses; None if there is none.

    Returns:
        The exit code that was reported, by this process or by another one.
    """
    mine = f"{_NO_RANK} {code} {secrets.token_hex(8)}"
    with _SPEAKING:
        if mailbox is not None:
            with suppress(CommunicationError):  # the store is gone or hangs
                first = _for_failures(mailbox).first(_REPORT, mine)
                if first != mine:
                    return code_in(first, EXIT_INTERNAL)
        _speak(message, code, rank=0)
    return code


def _report_after_delay(message: str, code: int, place: Place) -> None:
    if place.rank > 0:
        # Staggered by local rank: after the first rank of a node has reported and ended, the launcher ends the others.
        time.sleep(_LAUNCHER_SECONDS + _STAGGER_SECONDS * place.local_rank)
    _speak(message, code, place.rank)


def _speak(message: str, code: int, rank: int) -> None:
    write_exit_code(code)
    where = f" on rank {rank}" if rank else ""
    write_out()
    text = f"error{where}: {as_installed(message)}"
    with suppress(OSError):
        if record(text):
            say(text, to_error=True)


def write_exit_code(code: int) -> None:
    """Write the exit code to the file MEGALITE_EXIT_FILE, for the program that started the launcher.

    An existing file is kept: later errors are consequences of the first one.
    """
    path = os.environ.get("MEGALITE_EXIT_FILE")
    with suppress(FileError, OSError):
        if path and not Path(path).exists():
            write_at_once(Path(path), f"{code}\n".encode())


def default_mailbox() -> Mailbox | None:
    """Return the mailbox for failures of the process group, or None if there is no group. Does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    from megalite import torch_internals
    from megalite.mailbox import Mailbox

    return _for_failures(Mailbox(torch_internals.default_store(), distributed.get_world_size()))


def _for_failures(mailbox: Mailbox) -> Mailbox:
    """Return the mailbox with the prefix for failures, in place of the prefixes of the given one."""
    return mailbox.at_root(f"megalite/failure/{attempt()}/")

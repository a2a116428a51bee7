"""Rank that an agent forks: it becomes the process that its launcher's would have been, and runs its program."""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from megalite.errors import EXIT_INTERNAL, EXIT_RESUMABLE
from megalite.extras.recovery.generation import Generation
from megalite.process.output import say, write_out
from megalite.process.signals import STOP_SIGNALS

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(EXIT_RESUMABLE)


def close_all_but(kept: Collection[int]) -> None:
    """Close the files of the process that this one was forked from."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))


def take_streams(descriptors: Sequence[int]) -> None:
    """Use these files as standard input, output and error."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())  # type: ignore[union-attr]


def run_rank(hello: Mapping[str, Any], generation: Generation, environment: Mapping[str, str]) -> NoReturn:
    """Run the program of a rank, in a process just forked with stop signals blocked, and exit with its code.

    Args:
        hello: what the process of the launcher is: its program, arguments, folder and environment.
        generation: what the rank tells the agent, and knows of the run.
        environment: variables in place of the launcher's.
    """
    code = EXIT_INTERNAL
    generation = replace(generation, process=os.getpid())
    try:
        os.setpgid(0, 0)
        _take_signals(hello["ignored"], generation)
        os.chdir(hello["folder"])
        os.environ.clear()
        os.environ.update({**hello["environment"], **environment, **generation.variables()})
        sys.argv, sys.path[:] = hello["argv"], hello["path"]
        code = _run(hello)
    except BaseException as error:
        code = _report(error)
        hello = {**hello, "own_program": False}  # it does not end on purpose
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
        with suppress(BaseException):
            write_out()
        if hello["own_program"]:  # others tell it themselves, and earlier
            generation.tell_end(code)
        os._exit(code)


def _report(error: BaseException) -> int:
    """Report an error that ends the program, as Python would; return the exit code."""
    sys.last_value = error  # what runs at the end may look whether there is one
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as ending:
        if isinstance(ending.code, int):
            return ending.code
    except Exception:
        pass
    return EXIT_INTERNAL


def _run(hello: Mapping[str, Any]) -> int:
    """Run the program as Python would; return its exit code."""
    try:
        if hello["module"] is not None:
            runpy.run_module(hello["module"], run_name="__main__", alter_sys=True)
        elif hello["file"] is not None:
            runpy.run_path(hello["file"], run_name="__main__")
        else:
            from megalite.commands.pretrain import command

            command()
    except SystemExit as ending:
        if isinstance(ending.code, int):
            return ending.code
        if ending.code is not None:
            say(ending.code, to_error=True)
            return 1
    return 0


def _take_signals(ignored: Collection[int], generation: Generation) -> None:
    """Set the handlers that the launcher's process has, and end on stop signals until the program has its own."""

    def end(*_: object) -> None:
        generation.tell_end(EXIT_RESUMABLE)
        os._exit(EXIT_RESUMABLE)

    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN if number in ignored else end)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

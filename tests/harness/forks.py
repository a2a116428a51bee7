"""Processes that a test may kill: copies of a clean process, which is itself forked from the server."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.harness.fork_server import Rank, RankFailure, RankTimeout, fork_context


def in_clean_process(function: Callable[..., Any], *arguments: Any, seconds: float = 240.0) -> Any:
    """Return the result of `function(*arguments)` in a new process, which may fork: it has only imported modules.

    Raises:
        RankFailure: it raised; the message has its traceback.
        RankTimeout: it did not answer; the message has its stacks.
    """
    ours, theirs = fork_context().Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="clean_process_") as folder:
        process = Rank(0, Path(folder) / "stacks", _answer, (theirs, function, arguments), daemon=True)
        theirs.close()
        try:
            if not ours.poll(seconds):
                raise RankTimeout(f"no answer within {seconds:g} s:\n{process.stacks()}", {0: process.stacks()})
            failure, result = ours.recv()
        except EOFError:
            failure, result = process.describe_exit(), None
        finally:
            process.kill()
    if failure is not None:
        raise RankFailure(failure, {0: failure})
    return result


def _answer(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        connection.send((None, function(*arguments)))
    except BaseException:
        connection.send((traceback.format_exc(), None))


def fork(function: Callable[..., None], *arguments: Any) -> int:
    """Start `function(*arguments)` in a copy of this process; return its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def exit_code(process: int) -> int:
    """Wait for the end of a copy; return its exit code, minus the signal's number if a signal ended it."""
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)

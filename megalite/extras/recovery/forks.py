"""Processes that an agent forks: the ranks, and the one that calls the store."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from megalite.errors import EXIT_RESUMABLE, CommunicationError, MegaliteError
from megalite.extras.recovery import board
from megalite.extras.recovery.generation import Generation
from megalite.extras.recovery.lines import Ended, Lines, Message
from megalite.extras.recovery.marks import Marks
from megalite.extras.recovery.rank import close_all_but, end_with_parent, run_rank, take_streams
from megalite.lifecycle.torchrun_record import VARIABLE as RECORD
from megalite.process.launchers import MEMORY_FILES
from megalite.process.place import Place
from megalite.process.signals import STOP_SIGNALS


@dataclass(eq=False)
class Launched:
    """Process of the launcher, and the rank that runs for it."""

    lines: Lines
    hello: Message = field(default_factory=dict)
    place: Place = field(default_factory=lambda: Place(0, 0, 1))
    trains: Place = field(default_factory=lambda: Place(0, 0, 1))
    """Place of the rank in training, which is another one on a spare node."""
    flags: list[str] | None = None
    """Flags in place of the launcher's, of another layout; None: the launcher's."""
    process: int = 0
    """Rank's process; 0 if none is running."""
    pipe: int = -1
    """Pipe on which the rank tells where it is; -1 without one."""
    told: int | None = None
    """Exit code with which the rank has said that it ends on purpose."""
    ended: bool = False
    marks: Marks = field(default_factory=lambda: Marks(-1))
    """Marks by which the rank is asked to finish its step."""

    @property
    def is_computing(self) -> bool:
        """Return whether the rank computes gradients that it could keep."""
        return bool(self.process) and self.marks.descriptor >= 0 and self.marks.is_computing


@dataclass(frozen=True)
class Caller:
    """Process that calls the store for an agent, and the connection to it."""

    lines: Lines
    process: int

    def close(self) -> None:
        """End the process."""
        self.lines.close()
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


def fork_rank(rank: Launched, number: int, files: Sequence[int], baseline: set[int]) -> None:
    """Start the process of a rank.

    Args:
        rank: gets the process, and the pipe on which it tells where it is.
        number: number of the generation.
        files: files in memory that the rank is to have.
        baseline: open files that every rank inherits.
    """
    reading, writing = os.pipe()
    hello = rank.hello
    generation = Generation(number, hello["began"], hello["stop"] and tuple(hello["stop"]), writing, process=0)
    environment = _variables(rank, number)
    kept = baseline | set(files) | {writing}
    parent = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the rank has other handlers
    process = os.fork()
    if not process:
        if files:
            environment[MEMORY_FILES] = f"{os.getpid()} {','.join(map(str, files))}"
        _become_rank(rank, generation, environment, kept, parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.close(writing)
    os.set_blocking(reading, False)
    rank.process, rank.pipe, rank.told = process, reading, None


def fork_board(first: Launched, baseline: set[int]) -> Caller:
    """Start the process that writes and reads the board."""
    return fork_caller(first, baseline, _call_store)


def fork_caller(first: Launched, baseline: set[int], call: Callable[[Lines, Launched], None]) -> Caller:
    """Start a process that calls the store. `first`: the node's lowest rank; `baseline`: open files it inherits."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    process = os.fork()
    if not process:
        _run_caller(Lines(theirs), first, baseline, parent, call)
    theirs.close()
    return Caller(Lines(ours), process)


def _variables(rank: Launched, generation: int) -> dict[str, str]:
    """Return the variables that a rank has in place of those of its launcher."""
    place = rank.trains
    variables = {"MEGALITE_EXIT_FILE": ""}
    if rank.place.world_size > 1:
        variables |= {
            "RANK": str(place.rank),
            "LOCAL_RANK": str(place.local_rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_WORLD_SIZE": str(place.local_world_size),
            "MASTER_ADDR": place.host,
            "MASTER_PORT": str(place.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    if record := record_of(rank, generation):
        with suppress(OSError):
            Path(record).parent.mkdir(parents=True, exist_ok=True)
        variables[RECORD] = record
    return variables


def record_of(rank: Launched, generation: int) -> str:
    """Return the file for the error of a rank of a generation; "" if the launcher wants none."""
    given = rank.hello["environment"].get(RECORD)
    if not given:
        return ""
    attempt = Path(given).parent.parent  # .../attempt_0/LOCAL_RANK/error.json
    return str(
        attempt.parent / f"warm_{attempt.name}" / f"attempt_{generation}" / Path(given).parent.name / "error.json"
    )


def _become_rank(
    rank: Launched, generation: Generation, environment: dict[str, str], kept: set[int], parent: int
) -> NoReturn:
    try:
        end_with_parent(parent)
        take_streams(rank.lines.descriptors)
        close_all_but(kept)
        own = {} if rank.flags is None else {"argv": [rank.hello["argv"][0], *rank.flags]}
        run_rank(rank.hello | own, generation, environment)
    finally:
        os._exit(EXIT_RESUMABLE)


def _run_caller(
    lines: Lines, first: Launched, baseline: set[int], parent: int, call: Callable[[Lines, Launched], None]
) -> NoReturn:
    """Call the store for the agent, in a process just forked."""
    try:
        end_with_parent(parent)
        take_streams(first.lines.descriptors)
        close_all_but(baseline | {lines.fileno()})
        os.environ.clear()
        os.environ.update(first.hello["environment"])
        call(lines, first)
    except (Ended, CommunicationError):
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(EXIT_RESUMABLE)


def _call_store(lines: Lines, first: Launched) -> None:
    from megalite.lifecycle.rendezvous import connect

    try:
        mailbox = connect(first.place, first.hello["meeting_seconds"], "warm")
    except MegaliteError as error:
        lines.send({"failed": error.exit_code, "error": str(error)})
        return
    board.serve(lines, mailbox, first.place.world_size // (first.place.local_world_size or 1))

"""Process that a launcher has started for a rank, when ranks restart warm: it imports no torch and trains nothing.

It asks its node's agent for the rank, passes on stop signals, and ends with the code that the agent gives it. The
first such process of a node starts the agent.
"""

from __future__ import annotations

import errno
import hashlib
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megalite.config.parallel import ParallelConfig
from megalite.config.run import TaskConfig
from megalite.errors import EXIT_RESUMABLE, CommunicationError, ConfigurationError
from megalite.extras.recovery.lines import Ended, Lines, Message, is_own
from megalite.lifecycle.failure import report
from megalite.lifecycle.startup import SECONDS_BETWEEN_LOOKS, STOP, identity
from megalite.lifecycle.torchrun_record import VARIABLE
from megalite.process.host import start_of
from megalite.process.launchers import RANK_VARIABLES, launcher_process
from megalite.process.output import say
from megalite.process.place import Place
from megalite.process.programs import NOTHING, command_of, start
from megalite.process.signals import STOP_SIGNALS

_CONNECTING_SECONDS = 60.0
_BETWEEN_TRIES = 0.05
_REPLANNING_SECONDS = 120.0  # for the planner to choose another layout


def run_warm(config: TaskConfig, place: Place, *, own_program: bool = False) -> int:
    """Have the agent of this node run the program of this process, until the run ends. Returns its exit code.

    Args:
        config: the configuration, which has been checked.
        place: as the launcher tells it.
        own_program: the program is no command of megalite.

    Raises:
        ConfigurationError: the launcher or the system does not have what a warm restart needs.
        CommunicationError: the agent cannot be reached.
    """
    began = time.monotonic()
    _open_streams()
    recovery = config.recovery
    _require(place, recovery.goes_on_without_nodes)
    if recovery.elastic_replan:
        _require_other_layouts(config.parallel)
    save = os.path.realpath(str(config.checkpoint.save))
    launcher = _launcher()
    hello = {
        "place": asdict(place),
        "save": save,
        "copies": recovery.memory_checkpoint_interval != 0,
        "spare_nodes": recovery.spare_nodes,
        "replica_ranks": config.parallel.ranks_needed if recovery.elastic else 0,
        "replanning_seconds": _REPLANNING_SECONDS if recovery.elastic_replan else 0.0,
        "meeting_seconds": 60.0 * config.parallel.distributed_timeout_minutes,
        "launcher": launcher,
        "began": began,
        "stop": identity(Path(save) / STOP),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "path": sys.path,
        "ignored": [number for number in STOP_SIGNALS if signal.getsignal(number) == signal.SIG_IGN],
        "own_program": own_program,
        **_program(),
    }
    lines = _connect(_name(launcher, save), launcher)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in STOP_SIGNALS:
        if number not in hello["ignored"]:
            signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # in place of the one that would end this process
    lines.send(hello, (0, 1, 2))
    goes_on_without = recovery.goes_on_without_nodes and place.rank >= (place.local_world_size or 1)
    tell = _say_alone if goes_on_without else partial(report, None)
    return _follow(lines, reading, place, Path(save) / STOP, hello["stop"], tell)


def _open_streams() -> None:
    """Have standard input, output and error lead nowhere where they are closed: ranks get them by their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _require(place: Place, goes_on_without_nodes: bool) -> None:
    """Raise ConfigurationError if the system or the launcher does not have what is needed."""
    if not (hasattr(os, "pidfd_open") and Path("/proc/self/stat").exists()):
        raise ConfigurationError("--warm-restart needs Linux with /proc, from 5.3 on: drop it here")
    if place.world_size > 1 and place.local_world_size is None:
        raise ConfigurationError(
            "--warm-restart needs the number of ranks on each node, which this launcher does not tell: set "
            "LOCAL_WORLD_SIZE on every rank"
        )
    if goes_on_without_nodes and place.rank % (place.local_world_size or 1) != place.local_rank:
        raise ConfigurationError(
            f"--spare-nodes and --elastic: rank {place.rank} has the local rank {place.local_rank} of "
            f"{place.local_world_size}: start the ranks of each node one after the other (srun --distribution=block)"
        )


def _require_other_layouts(parallel: ParallelConfig) -> None:
    """Raise ConfigurationError if the bits that are promised leave no layout of fewer ranks.

    This is no part of `validate`: a run with fewer nodes may have come to such a layout.
    """
    if parallel.bitwise_elastic and parallel.pipeline_model_parallel_size == 1:
        raise ConfigurationError(
            "--elastic-replan with --bitwise-elastic changes --pipeline-model-parallel-size alone, which is 1: no "
            "layout of fewer ranks has the same bits. Drop one of the two flags"
        )


def _program() -> dict[str, Any]:
    """Return what each rank runs: the program of this process."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None)
    return {"argv": sys.argv, "module": spec.name if spec else None, "file": file and os.path.abspath(file)}


def run_program_warm(config: TaskConfig, place: Place) -> NoReturn:
    """Have the agent run the program from which this is called, and exit with its code when the run ends.

    Raises ConfigurationError if the agent could not run it, or if this process is connected with others.
    """
    program = _program()
    if program["module"] is None and program["file"] is None:
        raise ConfigurationError(
            "warm_restart=True needs a program in a file or a module, which ranks run from its start"
        )
    distributed = sys.modules["torch.distributed"]
    if distributed.is_available() and distributed.is_initialized():
        raise ConfigurationError(
            "warm_restart=True: create the Trainer before anything connects the ranks (torch.distributed."
            "init_process_group): they run the program from its start, in processes of their own"
        )
    sys.exit(run_warm(config, place, own_program=True))


def _launcher() -> int:
    """Return the ID of the process that started the ranks of this node."""
    names = ["RANK"] if "TORCHELASTIC_RUN_ID" in os.environ else [name for name in RANK_VARIABLES if name in os.environ]
    if not names:  # a shell has started a process alone, which may outlive it
        return os.getpid()
    return launcher_process(names) or os.getpid()


def _name(launcher: int, save: str) -> str:
    """Return the name of the agent's socket, which all ranks of a launcher on this node compute."""
    parts = f"{os.geteuid()} {launcher} {start_of(launcher)} {save}"
    return f"\0megalite-{hashlib.blake2b(parts.encode(errors='surrogateescape'), digest_size=16).hexdigest()}"


def _connect(name: str, launcher: int) -> Lines:
    """Connect to the agent, and start it if there is none."""
    deadline = time.monotonic() + _CONNECTING_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(name)
        except OSError as error:
            connection.close()
            if error.errno != errno.ECONNREFUSED or time.monotonic() > deadline:
                raise CommunicationError(f"the agent of this node's ranks cannot be reached: {error}") from error
            _start_agent(name, launcher)
            continue
        if not is_own(connection):
            raise CommunicationError("another user listens where the agent of this node's ranks should: start again")
        lines = Lines(connection)
        with suppress(Ended):
            if "welcome" in lines.receive()[0]:
                return lines
        lines.close()  # an agent of an earlier run that is about to end
        if time.monotonic() > deadline:
            raise CommunicationError("the agent of this node's ranks does not answer: start again")
        time.sleep(_BETWEEN_TRIES)


def _start_agent(name: str, launcher: int) -> None:
    """Start the agent with a socket that listens, unless another process is just doing the same."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            time.sleep(_BETWEEN_TRIES)
            return
        listener.listen(4096)
        descriptor = listener.fileno()
        # Some libraries start threads when they are imported, with which a process must not fork.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        start(
            command_of("megalite.extras.recovery.agent", "command", str(descriptor), str(launcher)),
            pass_fds=[descriptor],
            stdin=NOTHING,
            start_new_session=True,
            env=environment,
        )


def _follow(
    lines: Lines, signals: int, place: Place, stop: Path, old_stop: object, tell: Callable[[str, int], object]
) -> int:
    """Do what the agent says until it gives the exit code, and pass on stop signals. `tell`: reports an error.

    One process of the node also tells the agent of a `stop` file that is newer than the run. The agent needs it while
    no ranks run, as when other nodes are late.
    """
    looks = place.local_rank == 0
    poll = select.poll()
    poll.register(lines, select.POLLIN)
    poll.register(signals, select.POLLIN)
    while True:
        ready = poll.poll(1000 * SECONDS_BETWEEN_LOOKS if looks else None)
        if looks and identity(stop) not in (None, old_stop):
            lines.send({"stop": True})
        for descriptor, _ in ready:
            if descriptor == signals:
                for number in set(os.read(signals, 64)).intersection(STOP_SIGNALS):
                    lines.send({"signal": number})
                continue
            try:
                messages = lines.receive()
            except Ended:
                if place.local_rank == 0:
                    text = "the agent of this node's ranks has ended without a message, and they with it"
                    tell(text, EXIT_RESUMABLE)
                return EXIT_RESUMABLE
            for message in messages:
                if "say" in message:
                    with suppress(OSError):
                        say(message["say"])
                if "end" in message:
                    return _end(message, tell)


def _end(message: Message, tell: Callable[[str, int], object]) -> int:
    code: int = message["end"]
    if message.get("record") and os.environ.get(VARIABLE):
        with suppress(OSError):
            shutil.copyfile(message["record"], os.environ[VARIABLE])
    if message.get("error"):
        tell(message["error"], code)
    return code


def _say_alone(text: str, code: int) -> None:
    """Say why this node ends, and leave MEGALITE_EXIT_FILE to the others: the run may go on without it."""
    with suppress(OSError):
        say(f"error: {text}", to_error=True)

"""Wrapper of pretrain_gpt.py that plants a fault: FAULT="phase/rank/step/kind".

A fault occurs when its rank enters the phase for the first time in that step of this process, or later. Before that it
creates a file, named after the fault, in the folder FAULT_RECORD. So a test knows that the fault has occurred.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megalite.checkpoint import shard_file, transaction
from megalite.commands.pretrain import main
from megalite.data.index_cache import IndexCache
from megalite.errors import DataError
from megalite.lifecycle import failure, launch, rendezvous
from megalite.model.block import Block
from megalite.optim.accumulator import Accumulator
from megalite.optim.elementwise import FusedRule
from megalite.parallel import dispatch, key_value_exchange, transfer
from megalite.parallel.collectives import completed
from megalite.pipeline.engine import _Step
from megalite.run import loop, run
from megalite.tasks import gpt_task
from megalite.training import builder, checkpoints, trainer
from megalite.watchdog import monitor, sections, watchdog
from tests.harness.fault import Fault

RANK = int(os.environ["RANK"])
RECORD = Path(os.environ["FAULT_RECORD"])
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0"))  # added to the duration of each step
LAUNCHER_SECONDS = float(os.environ.get("LAUNCHER_SECONDS", "3"))  # for a launcher to end the ranks that wait
SECONDS = float(os.environ.get("LONGEST_SECONDS", "8"))  # limit for a start and for a save


FAULTS = [Fault.read(text) for text in filter(None, os.environ.get("FAULT", "").split(";"))]
if "MEGALITE_GENERATION" in os.environ:  # each occurs in one generation only
    FAULTS = [fault for fault in FAULTS if not fault.record(RECORD).exists()]


class Steps:
    """Number of steps that this process has begun."""

    begun = 0


class Skip(Exception):
    """Request not to call the wrapped function."""


def reach(phase: str) -> None:
    """Trigger the fault of this phase if it is due. Raises Skip if the wrapped function is to be skipped."""
    for fault in FAULTS:
        if (fault.phase, fault.rank) == (phase, RANK) and fault.step <= Steps.begun:
            FAULTS.remove(fault)
            fault.record(RECORD).write_text(str(fault))
            KINDS[fault.kind]()
            return


def wrap(owner: Any, name: str, phase: str, only: Callable[[], bool] = lambda: True) -> None:
    """Replace a function of a module or class by one that first reaches the phase."""
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if only():
            reach(phase)
        return original(*arguments, **named)

    setattr(owner, name, wrapped)


# ---------------------------------------------------------------------------------------------------- what happens


def _raise(error: Exception) -> NoReturn:
    raise error


def _signal(number: int, times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), number)


def _crash() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def _loop() -> NoReturn:
    while True:
        time.sleep(0.01)  # saves CPU time


KINDS: dict[str, Callable[[], Any]] = {
    "kill": lambda: _signal(signal.SIGKILL),
    "exit": lambda: os._exit(1),
    "crash": _crash,
    "stop": lambda: _signal(signal.SIGSTOP),
    "loop": _loop,
    "hold the GIL": lambda: ctypes.PyDLL(None).sleep(3600),
    "term": lambda: _signal(signal.SIGTERM),
    "usr1": lambda: _signal(signal.SIGUSR1, 5),
    "defect": lambda: _raise(AssertionError("planted")),  # not a RuntimeError, which a store or a backend may raise
    "data": lambda: _raise(DataError("planted")),
    "skip": lambda: _raise(Skip()),
}


# ---------------------------------------------------------------------------------------------------- where


def in_index_build() -> None:
    """Let the rank of the fault build the index: the other ranks wait for it."""
    get, builder = IndexCache.get, [fault for fault in FAULTS if fault.phase == "index build"]

    def disturbed_get(cache: IndexCache, path: str, description: Any, build: Callable[[], Any]) -> Any:
        def disturbed_build() -> Any:
            reach("index build")
            return build()

        deadline = time.monotonic() + 60.0
        while any(f.rank != RANK and not f.record(RECORD).exists() for f in builder) and time.monotonic() < deadline:
            time.sleep(0.01)
        return get(cache, path, description, disturbed_build)

    IndexCache.get = disturbed_get  # type: ignore[method-assign]


def in_backward() -> None:
    """Trigger within autograd, after the first gradient."""
    backward = _Step._backward

    def disturbed_backward(step: Any, action: Any) -> None:
        edges, terms = step._outputs[action.chunk, action.micro_batch]
        for node in (*(edge.node for edge in edges), *(term.grad_fn for term in terms.values())):
            node.register_prehook(lambda gradients: reach("backward"))
        backward(step, action)

    _Step._backward = disturbed_backward  # type: ignore[method-assign]


def in_reduction() -> None:
    begin = Accumulator._begin_sum

    def disturbed_begin(self: Accumulator) -> Any:
        try:
            reach("reduce")
        except Skip:
            return completed(self.gradient_shard)
        return begin(self)

    Accumulator._begin_sum = disturbed_begin  # type: ignore[method-assign]


def in_rendezvous() -> None:
    """Trigger in the rendezvous.

    On any rank, after all have connected to the store ("connected"). On rank 0, while it is alone ("came": the others
    come later), or after all have connected ("meeting").
    """
    wait_for_all_ranks, wait_for_all = rendezvous.wait_for_all_ranks, rendezvous._wait_as_host
    absent = [fault for fault in FAULTS if fault.phase == "came"]
    connected = [RECORD / f"connected {os.environ['MASTER_PORT']} {r}" for r in range(int(os.environ["WORLD_SIZE"]))]

    def disturbed_wait_for_all_ranks(*arguments: Any) -> None:
        while any(fault.rank != RANK and not fault.record(RECORD).exists() for fault in absent):
            time.sleep(0.01)
        time.sleep(0.5 * len(absent))  # until the fault has occurred
        connected[RANK].touch()
        while any(fault.phase == "connected" for fault in FAULTS) and not all(map(Path.exists, connected)):
            time.sleep(0.01)
        reach("connected")
        wait_for_all_ranks(*arguments)

    def disturbed_wait(mailbox: Any, place: Any, seconds: float) -> str:
        reach("came")
        ranks = range(place.world_size)
        while any(fault.phase == "meeting" for fault in FAULTS) and len(
            mailbox.gather(rendezvous._CAME, ranks, 0.0)
        ) < len(ranks):
            time.sleep(0.01)
        reach("meeting")
        return wait_for_all(mailbox, place, seconds)

    rendezvous.wait_for_all_ranks, rendezvous._wait_as_host = disturbed_wait_for_all_ranks, disturbed_wait


def count_steps() -> None:
    step = trainer.Trainer.step

    def counted(self: trainer.Trainer) -> Any:
        Steps.begun += 1
        time.sleep(STEP_SECONDS)
        return step(self)

    trainer.Trainer.step = counted  # type: ignore[method-assign]


def disturb() -> None:
    count_steps()
    in_index_build()
    wrap(rendezvous, "_check_in", "meeting", lambda: RANK > 0)
    in_rendezvous()
    wrap(launch.dist, "init_process_group", "group")
    wrap(builder, "make_optimizer", "building")
    wrap(trainer.checkpoint, "load", "loading")
    wrap(gpt_task, "to_micro_batches", "data")
    wrap(Block, "forward", "forward", torch.is_grad_enabled)
    wrap(Block, "forward", "evaluation", lambda: not torch.is_grad_enabled())
    in_backward()
    wrap(dispatch, "exchange_rows_async", "exchange")
    wrap(transfer._End, "backward", "exchange in backward")
    wrap(key_value_exchange.Ring, "pass_on", "round")
    wrap(key_value_exchange._RingSum, "add", "round in backward")
    in_reduction()
    wrap(FusedRule, "update", "optimizer")
    wrap(loop.TrainingLoop, "_agree", "agreement")
    wrap(shard_file, "blocks_of", "writing")
    wrap(transaction.FolderTransaction, "_point_tracker", "commit")
    wrap(checkpoints.Checkpoints, "_remove_old", "saved")
    wrap(loop.TrainingLoop, "_test", "test")
    wrap(watchdog.Watchdog, "_leave", "leaving")
    wrap(run, "disconnect", "closing")


def shorten() -> None:
    """Shorten times that may be an hour to seconds, and the waits for answers and launchers."""
    watchdog._LEAVING_SECONDS = 0.5
    watchdog.ANSWER_SECONDS = monitor.ANSWER_SECONDS = 2.5
    watchdog._VERDICT_SECONDS, watchdog._SILENT_SECONDS = 5.0, 2.5
    failure._LAUNCHER_SECONDS, rendezvous.SILENCE = LAUNCHER_SECONDS, 2.0
    sections.LEAST_SILENCE = 2.0
    sections.START_SECONDS = watchdog._FIRST_SECONDS = SECONDS
    sections.Limits.__init__ = (  # type: ignore[method-assign]
        lambda self, least, unlearnt, starts_again=False: self.__dict__.update(
            least=least, unlearnt=SECONDS, starts_again=starts_again
        )
    )


if __name__ == "__main__":
    disturb()
    shorten()
    failure.run_main(main)

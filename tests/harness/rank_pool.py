"""Pools of ranks, connected by gloo, that are forked once and kept for the whole test run."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import io
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megalite.process import signals
from tests.harness.fork_server import Rank, RankFailure, RankTimeout, fork_context, loopback_interface

GRACE_SECONDS = 1.0  # after a failure, for the ranks that fail for the same reason
SUSPENDS = sys.platform == "linux"  # a rank's state is read in /proc
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)  # the pool's own timeout is shorter, and shows the stacks


class RankPool:
    """Pool of `world_size` processes, each with the default gloo process group and one torch thread.

    The processes start at the first call. Each call begins with torch's generator at seed 0 and the default dtype
    float32. The process groups that it creates are destroyed after it. Other state of the process (modules, environment
    variables) is kept. After a failure the processes are killed, and the next call starts new ones.

    Between calls the processes are suspended: a thread of gloo wakes up a hundred times a second for each group, and
    all pools of a test run together would keep a fifth of two cores busy.
    """

    def __init__(self, world_size: int, timeout: float = 240.0) -> None:
        self.world_size = world_size
        self.timeout = timeout  # seconds
        self._directory = tempfile.TemporaryDirectory(prefix="rank_pool_")
        self._ranks: list[Rank] = []
        self._connections: list[Connection] = []
        self._guard: BaseProcess | None = None
        atexit.register(self.close)  # multiprocessing would wait for ranks that are suspended
        self._rest = False  # the ranks are suspended, or are about to suspend themselves

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank; return the results in rank order.

        `function` is a module-level function (or anything else that can be pickled): ranks import it by name. Arguments
        and results, tensors included, are copied by pickle. A call may take `self.timeout` seconds.

        Raises:
            RankFailure: a rank raised (the message has the lowest such rank's traceback) or died.
            RankTimeout: a rank did not answer; the message has its stacks.
        """
        return self.run_within(self.timeout, function, *args, **kwargs)

    def run_within(self, seconds: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call as `run` does, with its own time limit."""
        request = _encode((function, args, kwargs))
        if not self._ranks:
            self._start()
        try:
            self._wake(seconds)
            self._send(request)
            results = self._collect(seconds)
            # After all have answered: a group that one rank closes may still be in use on another.
            self._send(b"")
            self._rest = SUSPENDS
        except BaseException:
            self.close()
            raise
        return results

    def close(self) -> None:
        """Kill the processes; a later call starts new ones."""
        for end in self._connections:
            end.close()
        for rank in self._ranks:
            rank.kill()
        if self._guard is not None:
            self._guard.kill()
            self._guard.join()
        self._guard = None
        self._ranks, self._connections, self._rest = [], [], False

    def _wake(self, seconds: float) -> None:
        """Let the ranks go on, each as soon as it has cleaned up; `_collect` reports those that have died."""
        if not self._rest:
            return
        deadline = time.monotonic() + seconds
        for rank in self._ranks:
            while rank.state not in ("T", "Z", ""):
                if time.monotonic() > deadline:
                    stacks = {rank.number: rank.stacks()}
                    raise RankTimeout(self._timeout_message(seconds, stacks), stacks)
                time.sleep(0.0005)
            rank.send_signal(signal.SIGCONT)
        self._rest = False

    def _start(self) -> None:
        context = fork_context()
        with socket.create_server(("127.0.0.1", 0), backlog=self.world_size) as listener:
            for number in range(self.world_size):
                ours, theirs = context.Pipe()
                place = _Place(
                    number, self.world_size, listener.getsockname()[1], listener if number == 0 else None, theirs
                )
                stacks = Path(self._directory.name) / f"rank{number}.stacks"
                self._ranks.append(Rank(number, stacks, _serve, (place,), daemon=True))
                self._connections.append(ours)
                theirs.close()
        if SUSPENDS:
            process_ids = [rank.process.pid for rank in self._ranks]
            self._guard = context.Process(target=_kill_after_parent, args=(process_ids,), daemon=True)
            self._guard.start()

    def _send(self, message: bytes) -> None:
        for end in self._connections:
            try:
                end.send_bytes(message)
            except BrokenPipeError:
                continue  # it has died; `_collect` reports how

    def _collect(self, seconds: float) -> list[Any]:
        """Receive every rank's result, or raise an error with the known facts about each failure."""
        results: dict[int, Any] = {}
        raised: dict[int, str] = {}
        died: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        silent = dict(enumerate(self._connections))
        while silent:
            ready = connection.wait(list(silent.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for number in [number for number, end in silent.items() if end in ready]:
                end = silent.pop(number)
                try:
                    answer: _Answer = _decode(end.recv_bytes())
                except (EOFError, ConnectionError):
                    died[number] = self._ranks[number].describe_exit()
                else:
                    (results if answer.error is None else raised)[number] = answer.error or answer.result
            if raised or died:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if raised or died:
            raise RankFailure(self._failure_message(raised, died, sorted(silent)), raised | died)
        if silent:
            stacks = {number: self._ranks[number].stacks() for number in silent}
            raise RankTimeout(self._timeout_message(seconds, stacks), stacks)
        return [results[number] for number in range(self.world_size)]

    def _failure_message(self, raised: dict[int, str], died: dict[int, str], silent: list[int]) -> str:
        lines = [f"rank {number} of {self.world_size} {how}" for number, how in sorted(died.items())]
        if raised:
            lowest, *others = sorted(raised)
            lines.append(f"rank {lowest} of {self.world_size} raised:\n{raised[lowest]}")
            if others:
                lines.append(f"ranks {others} raised too")
        if silent:
            lines.append(f"ranks {silent} had not answered {GRACE_SECONDS:g} s later")
        return "\n".join(lines)

    def _timeout_message(self, seconds: float, stacks: dict[int, str]) -> str:
        head = f"ranks {sorted(stacks)} of {self.world_size} did not answer within {seconds:g} s"
        return "\n\n".join([head, *(f"rank {number}:\n{stack}" for number, stack in sorted(stacks.items()))])


class RankPools:
    """Pools by world size, each created at its first use: `rank_pools(4)`."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        return self._pools.setdefault(world_size, RankPool(world_size))

    def close(self) -> None:
        """End every process of every pool."""
        for pool in self._pools.values():
            pool.close()


@dataclass(frozen=True)
class _Place:
    """Place of one process: its rank, the address of the store, and the source of its calls."""

    rank: int
    world_size: int
    port: int
    listener: (
        socket.socket | None
    )  # on rank 0: the store's socket, bound before any rank starts, so that no other process can take the port
    connection: Connection


@dataclass(frozen=True)
class _Answer:
    result: Any = None
    error: str | None = None  # the traceback


def _kill_after_parent(process_ids: list[int]) -> None:
    """Wait for the end of the test process, then kill the ranks: suspended ones do not notice it themselves."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    for process_id in process_ids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)


def _serve(place: _Place) -> None:
    """Join the group, then answer calls until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process handles Ctrl-C
    torch.set_num_threads(1)
    if interface := loopback_interface():
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    store = dist.TCPStore(
        "127.0.0.1",
        place.port,
        is_master=place.listener is not None,
        wait_for_workers=False,
        master_listen_fd=place.listener.detach() if place.listener else None,
    )
    dist.init_process_group(
        "gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=COLLECTIVE_TIMEOUT
    )
    witness: list[None] = []
    while True:
        try:
            request = place.connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        if request:
            place.connection.send_bytes(_answer(request))
        else:
            _forget_the_end_of_the_process()
            if _destroy_groups():
                witness = _collect_garbage(witness)
            if SUSPENDS:
                os.kill(os.getpid(), signal.SIGSTOP)


def _answer(request: bytes) -> bytes:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    try:
        function, args, kwargs = _decode(request)
        return _encode(_Answer(result=function(*args, **kwargs)))
    except BaseException:
        return _encode(_Answer(error=traceback.format_exc()))


def _forget_the_end_of_the_process() -> None:
    """Drop what the call has registered for the end of the process: its models and groups would live until then.

    A rank is killed, and so calls nothing at its end.
    """
    atexit._clear()
    threading._threading_atexits.clear()  # type: ignore[attr-defined]
    signals._last_words.clear()


def _destroy_groups() -> bool:
    """Destroy the process groups that the call created; tell whether there were any.

    Each has sockets and three threads until it is garbage-collected, and objects that a call leaves behind refer to it
    in cycles.
    """
    groups = [group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    for group in groups:
        dist.destroy_process_group(group)
    return bool(groups)


def _collect_garbage(witness: list[None]) -> list[None]:
    """Collect the garbage of this process.

    If a memory test has called `gc.freeze`, `witness` is frozen. Then unfreeze, collect among all objects, also those
    that the fork server had frozen, freeze again and return a new witness.
    """
    if any(found is witness for found in gc.get_objects()):
        gc.collect()
        return witness
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    return []


def _encode(value: Any) -> bytes:
    """Pickle; `torch.save` does so several times faster than pickle if there are many tensors."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _decode(message: bytes) -> Any:
    return torch.load(io.BytesIO(message), weights_only=False)

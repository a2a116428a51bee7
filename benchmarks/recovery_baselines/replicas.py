"""Data-parallel training with torchft: each rank is a replica that may come and go, as its documentation shows it.

This process is the launcher: it has torchft's lighthouse, and starts a replica again that has died. A new one gets the
weights from another; there are no checkpoints.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.recovery_baselines.network import log, loss, network, write_weights

REPLICAS, MOST_STARTS = 2, 10
_SECONDS = timedelta(seconds=20)


def connect(rank: int, load: Any, state: Any) -> Any:
    """Return the manager of a replica, which has a store of its own."""
    from torchft import Manager, ProcessGroupGloo

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_SECONDS),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=False,
        init_sync=False,  # all begin with the same weights
        timeout=_SECONDS,
        quorum_timeout=_SECONDS,
        connect_timeout=_SECONDS,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"replica_{rank}",
    )
    manager.store_of_this_replica = store
    return manager


def meet(run: Path, rank: int) -> None:
    """Wait until each replica has started once, so that all make the first step together."""
    (run / f"came{rank}").touch()
    while len(list(run.glob("came*"))) < REPLICAS:
        time.sleep(0.01)


def train_step(run: Path, rank: int, manager: Any, model: torch.nn.Module, optimizer: Any, seconds: float) -> int:
    """Run a step together with the replicas that there are; returns its number, that of the next if none was made."""
    manager.start_quorum()
    step = manager.current_step() + 1
    optimizer.zero_grad()
    value = forward_backward(model, step, rank)
    time.sleep(seconds)
    for tensor in (*(each.grad for each in model.parameters()), value):
        manager.allreduce(tensor).wait()
    if manager.should_commit():
        optimizer.step()
        if manager.participating_rank() == 0:
            log(run, step, value.item())
    return int(manager.current_step())


def forward_backward(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    """Compute the gradients of this replica's samples; returns their loss."""
    value = loss(model, step, rank, REPLICAS)
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def train(arguments: argparse.Namespace, rank: int) -> None:
    """Be a replica."""
    torch.set_num_threads(1)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def load(values: Any) -> None:
        model.load_state_dict(values["model"])
        optimizer.load_state_dict(values["optimizer"])

    meet(arguments.directory, rank)
    manager = connect(rank, load, lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    while manager.current_step() < arguments.steps:
        train_step(arguments.directory, rank, manager, model, optimizer, arguments.step_seconds)
    if rank == 0:
        write_weights(arguments.directory, model)
    manager.shutdown(wait=False)
    os._exit(0)


def main(arguments: argparse.Namespace) -> None:
    """Start the replicas and keep them alive, or be one of them."""
    if "RANK" in os.environ:
        train(arguments, int(os.environ["RANK"]))
    from torchft.coordination import LighthouseServer

    arguments.directory.mkdir(parents=True, exist_ok=True)
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=3000)
    address = lighthouse.address()

    def start(rank: int) -> subprocess.Popen[bytes]:
        own = {"RANK": str(rank), "TORCHFT_LIGHTHOUSE": address}
        return subprocess.Popen([sys.executable, "-m", __package__, *sys.argv[1:]], env={**os.environ, **own})

    running, starts = {rank: start(rank) for rank in range(REPLICAS)}, REPLICAS
    while running:
        time.sleep(0.05)
        for rank, process in list(running.items()):
            if process.poll() == 0:
                del running[rank]
            elif process.poll() is not None:
                starts += 1
                if starts > MOST_STARTS:
                    raise SystemExit("too many starts")
                running[rank] = start(rank)
    lighthouse.shutdown()

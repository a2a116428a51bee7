"""Data-parallel training under torchrun with torch.distributed.checkpoint, as its documentation shows it.

Each save is a folder `step_NNNNNN`; the newest that has DCP's `.metadata`, which is written last, is loaded at the
start. torchrun starts all ranks anew when one has died (--max-restarts).
"""

from __future__ import annotations

import argparse
import datetime
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks.recovery_baselines.network import log, loss, network, write_weights


def connect() -> None:
    """Meet the other ranks."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))


def load(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint; returns its step, 0 without one."""
    newest = [max((path.parent.name for path in run.glob("step_*/.metadata")), default="")]
    dist.broadcast_object_list(newest, 0)
    if not newest[0]:
        return 0
    weights, state = get_state_dict(model, optimizer)
    values: dict[str, Any] = {"model": weights, "optimizer": state}
    dcp.load(values, checkpoint_id=run / newest[0])
    set_state_dict(model, optimizer, model_state_dict=values["model"], optim_state_dict=values["optimizer"])
    return int(newest[0][5:])


def save(run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save a checkpoint."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=run / f"step_{step:06d}")


def forward_backward(model: nn.Module, step: int) -> Tensor:
    """Compute the gradients of this rank's samples; returns their loss."""
    value = loss(model, step, dist.get_rank(), dist.get_world_size())
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def reduce(model: nn.Module, value: Tensor) -> None:
    """Average gradients and loss over the ranks."""
    for tensor in (*(each.grad for each in model.parameters()), value):
        assert tensor is not None
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def train_step(run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, seconds: float) -> int:
    """Run a step; returns its number."""
    optimizer.zero_grad()
    value = forward_backward(model, step)
    time.sleep(seconds)
    reduce(model, value)
    optimizer.step()
    if dist.get_rank() == 0:
        log(run, step, value.item())
    return step


def main(arguments: argparse.Namespace) -> None:
    """Train to the last step."""
    torch.set_num_threads(1)
    run: Path = arguments.directory
    run.mkdir(parents=True, exist_ok=True)
    connect()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(load(run, model, optimizer) + 1, arguments.steps + 1):
        train_step(run, step, model, optimizer, arguments.step_seconds)
        if step % arguments.save_interval == 0:
            save(run, step, model, optimizer)
    if dist.get_rank() == 0:
        write_weights(run, model)
    dist.destroy_process_group()

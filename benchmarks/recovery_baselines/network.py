"""Network and data of the baselines: what a step learns from depends on its number alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, WIDTH = 8, 64


def network() -> nn.Module:
    """Return the network, with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def loss(model: nn.Module, step: int, rank: int, world_size: int) -> Tensor:
    """Return the loss on a rank's samples of a step: those after `BATCH * step`, dealt in turn."""
    samples = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))[rank::world_size]
    return F.mse_loss(model(samples), samples.roll(1, dims=1))


def log(run: Path, step: int, value: float) -> None:
    """Append a line to the run's records."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": step, "consumed_samples": BATCH * step, "lm_loss": value}) + "\n")


def write_weights(run: Path, model: nn.Module) -> None:
    """Leave the final weights as bytes."""
    (run / "final.bin").write_bytes(b"".join(each.detach().numpy().tobytes() for each in model.parameters()))

"""Runs with two optimizers on a rank, as megalite trains them, and the same steps in plain torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import megalite
from tests.distributed.layout_run import Held, held
from tests.harness.unsharded import unsharded_parameters

SAMPLES, FEATURES, NOISE = 8, 4, 3
COUNTED = ("generator", "critic")
STEPS = (("critic",), ("generator",), ("critic",), ("critic",), ("generator", "critic"), ("generator",))
"""Names of the optimizers that each step updates."""
OPTIMIZERS = {
    "generator": megalite.AdamW(
        lr=0.01, weight_decay=0.1, clip_grad=0.05, betas=(0.5, 0.9), schedule="linear", steps=4, min_lr=1e-4
    ),
    "critic": megalite.SGD(lr=0.02, momentum=0.9, weight_decay=0.0),
}


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.generator = nn.Sequential(nn.Linear(NOISE, 6), nn.Tanh(), nn.Linear(6, FEATURES))
        self.critic = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self.critic(real), self.critic(self.generator(noise))


class Mixed(Gan):
    """Model with a frozen layer, and with vectors that have an optimizer of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.critic[0].requires_grad_(False)
        self.norm = nn.LayerNorm(FEATURES)

    def forward(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(self.norm(real), noise)


MIXED = {
    "generator": megalite.Muon(lr=0.01),
    "critic": megalite.Lion(lr=0.01, weight_decay=0.1),
    "norm": megalite.Adafactor(lr=0.01),
}
MIXED_STEPS = (("critic", "norm"), ("generator",), ("critic",), ("generator",), tuple(MIXED))


def samples(count: int = SAMPLES * len(STEPS)) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)

    def numbers(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    return [{"real": numbers(FEATURES) + 1.0, "noise": numbers(NOISE)} for _ in range(count)]


def losses(outputs: Any, batch: Any) -> dict[str, Tensor]:
    real, fake = outputs
    return {"generator": softplus(-fake).sum(), "critic": (softplus(-real) + softplus(fake)).sum()}


def counts(batch: Any) -> dict[str, int]:
    return dict.fromkeys(COUNTED, len(batch["real"]))


def trainer(dp: int, **options: Any) -> megalite.Trainer:
    layout = megalite.Layout(**{name: options.pop(name) for name in ("tp", "zero", "overlap") if name in options})
    settings: dict[str, Any] = {"loss": losses, "count": counts, "optimizer": OPTIMIZERS, "precision": "fp64"}
    settings["dataset"] = samples()
    return megalite.Trainer(
        options.pop("model", Gan)(),
        micro_batch_size=SAMPLES // dp // 2,
        global_batch_size=SAMPLES,
        layout=layout,
        quiet=True,
        watchdog=False,
        **(settings | options),
    )


@dataclass(frozen=True)
class Run:
    """Result on one rank: the records of the steps and the parameters afterwards."""

    records: list[dict[str, Any]]
    parameters: list[Held]


def run_steps(dp: int, steps: Sequence[Sequence[str]] = STEPS, **options: Any) -> Run:
    """Run the steps that are left."""
    run = trainer(dp, **options)
    records = [run.step(only=names) for names in steps[run.iteration :]]
    return Run(records, ended(run))


def ended(run: megalite.Trainer) -> list[Held]:
    """Return the parameters of a run, and end it."""
    with unsharded_parameters(run._trainer.optimizer):
        found = held(run._trainer.network, run.mesh, lambda parameter: parameter)
    run.close()
    return found


def saved_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of the newest checkpoint."""
    newest = max(folder.glob("*/manifest.json"))
    found: dict[str, Any] = json.loads(newest.read_text())
    return found


def plainly() -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Train in plain torch. Returns the losses of each step, and the parameters."""
    model = Gan().double()
    first, second = OPTIMIZERS["generator"], OPTIMIZERS["critic"]
    assert isinstance(first, megalite.AdamW)
    assert isinstance(second, megalite.SGD)
    matrices = [each for each in model.generator.parameters() if each.dim() > 1]
    vectors = [each for each in model.generator.parameters() if each.dim() == 1]
    groups = [{"params": matrices, "weight_decay": first.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizers: dict[str, torch.optim.Optimizer] = {
        "generator": torch.optim.AdamW(groups, lr=first.lr, betas=first.betas),
        "critic": torch.optim.SGD(model.critic.parameters(), lr=second.lr, momentum=second.momentum),
    }
    assert first.steps is not None
    length, lowest = first.steps, first.min_lr / first.lr
    schedules = {
        "generator": torch.optim.lr_scheduler.LambdaLR(
            optimizers["generator"], lambda step: max(lowest, lowest + (1 - lowest) * (1 - step / length))
        ),
        "critic": torch.optim.lr_scheduler.LambdaLR(optimizers["critic"], lambda step: 1.0),
    }
    data, records = samples(), list[dict[str, float]]()
    for step, names in enumerate(STEPS):
        some = data[step * SAMPLES : (step + 1) * SAMPLES]
        batch = {name: torch.stack([each[name] for each in some]) for name in some[0]}
        found = losses(model(**batch), batch)
        gradients = {
            name: torch.autograd.grad(
                sum((found[each] for each in names), torch.zeros(())) / SAMPLES,
                list(model.get_submodule(name).parameters()),
                retain_graph=True,
            )
            for name in names
        }
        for name in names:
            for parameter, gradient in zip(model.get_submodule(name).parameters(), gradients[name], strict=True):
                parameter.grad = gradient
            if name == "generator":
                torch.nn.utils.clip_grad_norm_(model.generator.parameters(), first.clip_grad)
            optimizers[name].step()
            schedules[name].step()
        records.append({name: found[name].item() / SAMPLES for name in names})
    return records, {name: each.detach() for name, each in model.named_parameters()}

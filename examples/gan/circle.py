"""A generative adversarial network draws points on a circle: at least 90 of 100 within a fifth of its radius.

python examples/gan/circle.py, or
torchrun --standalone --max-restarts=0 --nproc-per-node 2 examples/gan/circle.py zero=3
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import megalite


def sample(number: int) -> dict[str, Tensor]:
    angle = torch.tensor(0.1 * number)
    return {"real": torch.stack([angle.cos(), angle.sin()]), "noise": torch.randn(4)}


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        drawn = self.generator(noise)
        return self.critic(real), self.critic(drawn), drawn


def losses(outputs: tuple[Tensor, ...], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    real, false, _ = outputs
    return {"critic": (softplus(-real) + softplus(false)).sum(), "generator": softplus(-false).sum()}


torch.manual_seed(0)
run = megalite.Trainer(
    Gan(),
    loss=losses,
    count=lambda batch: dict.fromkeys(("critic", "generator"), len(batch["real"])),
    metrics={"on the circle": lambda outputs, batch: ((outputs[2].norm(dim=1) - 1).abs() < 0.2).sum()},
    dataset=[sample(number) for number in range(10_000)],
    shuffle=True,
    optimizer={
        "generator": megalite.AdamW(lr=2e-3, betas=(0.5, 0.9)),
        "critic": megalite.AdamW(lr=4e-3, betas=(0.5, 0.9)),
    },
    micro_batch_size=128,
    global_batch_size=256,
    layout=megalite.Layout(**{name: int(size) for name, size in (word.split("=") for word in sys.argv[1:])}),
)
for batch in run.batches(steps=500):
    run.step(batch, only="generator" if run.iteration % 2 else "critic")
on_the_circle = run.evaluate([sample(number) for number in range(512)])["on the circle"]
assert on_the_circle >= 0.9
print(f"a share of {on_the_circle:.2f} is on the circle")

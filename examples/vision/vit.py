"""A vision transformer reads handwritten digits: at least 96 of 100 that it has not seen.

python examples/vision/vit.py, or torchrun --standalone --max-restarts=0 --nproc-per-node 2 examples/vision/vit.py pp=2
"""

from __future__ import annotations

import sys

import torch
from digits import digits
from torch import nn

import megalite


class Patches(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(1, 64, kernel_size=2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, 64))

    def forward(self, image: torch.Tensor) -> torch.Tensor:  # [batch, 1, 8, 8] to [batch, 16, 64]
        return super().forward(image).flatten(2).transpose(1, 2) + self.positions


torch.manual_seed(0)
blocks = [nn.TransformerEncoderLayer(64, 4, 128, 0.1, "gelu", batch_first=True, norm_first=True) for _ in range(4)]
train, valid = digits()
run = megalite.Trainer(
    nn.Sequential(Patches(), *blocks, nn.LayerNorm(64), nn.Flatten(), nn.Linear(16 * 64, 10)),
    loss=lambda scores, batch: nn.functional.cross_entropy(scores, batch[1]),
    metrics={"accuracy": lambda scores, batch: (scores.argmax(1) == batch[1]).sum()},
    dataset=torch.utils.data.DataLoader(train, batch_size=32, shuffle=True),
    valid_dataset=valid,
    global_batch_size=64,
    optimizer=megalite.AdamW(lr=1e-3, weight_decay=0.1, schedule="cosine", steps=150),
    layout=megalite.Layout(**{name: int(size) for name, size in (word.split("=") for word in sys.argv[1:])}),
)
run.train(steps=150)
assert run.evaluate()["accuracy"] >= 0.96

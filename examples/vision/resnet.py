"""ResNet-18 reads handwritten digits: at least 97 of 100 that it has not seen. Its first layer is for small images.

python examples/vision/resnet.py, or torchrun --standalone --max-restarts=0 --nproc-per-node 2 examples/vision/resnet.py
with pp=2, for example: the messages between the stages are as wide as the layers are there.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import torch
from digits import digits
from torch import Tensor, nn

import megalite


class Block(nn.Module):
    """Two convolutions around which the input is added: as it is, or by a convolution where its shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(megalite.SyncBatchNorm(after) for _ in range(2))
        self.short: nn.Module = nn.Identity()
        if before != after:
            convolution = nn.Conv2d(before, after, 1, stride, bias=False)
            self.short = nn.Sequential(convolution, megalite.SyncBatchNorm(after))

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.norms[0](self.first(image)).relu()
        return (self.norms[1](self.second(hidden)) + self.short(image)).relu()


def resnet18(width: int = 64) -> nn.Sequential:
    """Return the 18 layers: a convolution, eight blocks of two each, and a linear layer."""
    begin = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), megalite.SyncBatchNorm(width), nn.ReLU())
    widths = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
    blocks = [Block(before, after, 1 if before == after else 2) for before, after in pairwise(widths)]
    return nn.Sequential(begin, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


torch.manual_seed(0)
train, valid = digits()
run = megalite.Trainer(
    resnet18(width=16),
    loss=lambda scores, batch: nn.functional.cross_entropy(scores, batch[1]),
    metrics={"accuracy": lambda scores, batch: (scores.argmax(1) == batch[1]).sum()},
    dataset=torch.utils.data.DataLoader(train, batch_size=32, shuffle=True),
    valid_dataset=valid,
    global_batch_size=64,
    optimizer=megalite.SGD(lr=0.05, momentum=0.9, weight_decay=5e-4, schedule="cosine", steps=100),
    layout=megalite.Layout(**{name: int(size) for name, size in (word.split("=") for word in sys.argv[1:])}),
)
run.train(steps=100)
assert run.evaluate()["accuracy"] >= 0.97

"""Models of one's own on this machine's GPU: losses in float64 against the CPU's, and what generation and training say.

python -m benchmarks.gpu_own_model      prints the losses of this machine's first GPU, or of its CPU without one
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import torch
from torch import nn

import megalite
from benchmarks.errors import largest

TOLERANCE = 1e-9  # relative; ten steps of float64 sums in another order
LOG_PROBABILITIES = 1e-5  # fp32 sums of another order, over a network of two layers


def figures() -> dict[str, list[float] | float]:
    """Return the losses of a plain model, and how far generation's log-probabilities are from those of training."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.0), nn.Flatten(), nn.Linear(8 * 36, 10)
    dataset = [(image, label) for image, label in zip(torch.randn(64, 1, 8, 8), torch.arange(64) % 10, strict=True)]
    with megalite.Trainer(
        nn.Sequential(*layers),
        loss=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1]),
        dataset=dataset,
        optimizer=megalite.AdamW(lr=1e-3, clip_grad=1.0),
        precision="fp64",
        micro_batch_size=8,
        global_batch_size=16,
        recompute=True,
        quiet=True,
    ) as run:
        losses = [run.step()["loss"] for _ in range(10)]
    config = megalite.GPTConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=64, position_embedding_type="rope",
        hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    with megalite.Trainer(config, seq_length=32, micro_batch_size=4, optimizer=megalite.SGD(lr=0.1), quiet=True) as run:
        batch = run.rollout_batch(run.generate([[1, 2], [3], [4, 5, 6], [7]], max_new_tokens=24))
        difference = run.compare_logprobs(batch)["log_probability_difference_max"]
    return {"losses": losses, "log_probability_difference": difference}


def compare(deadline: float) -> dict[str, float]:
    """Run `figures` on the GPU and on the CPU; returns the largest relative difference of losses, and that of scores.

    Raises CalledProcessError, or TimeoutExpired at the deadline, of the monotonic clock.
    """
    found = []
    for hidden in ({}, {"CUDA_VISIBLE_DEVICES": ""}):
        left = None if deadline == float("inf") else max(deadline - time.monotonic(), 0.0)
        command = [sys.executable, "-m", "benchmarks.gpu_own_model"]
        ended = subprocess.run(command, env=os.environ | hidden, stdout=subprocess.PIPE, check=True, timeout=left)
        found.append(json.loads(ended.stdout))
    here, on_cpu = found
    pairs = zip(here["losses"], on_cpu["losses"], strict=True)
    return {
        "largest relative difference": largest(abs(a - b) / abs(b) for a, b in pairs),
        "log-probability difference": here["log_probability_difference"],
    }


if __name__ == "__main__":
    print(json.dumps(figures()))

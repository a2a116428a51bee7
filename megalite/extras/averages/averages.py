"""Averages of checkpoints: the weight of each by a method, and the sums, computed in float64 and rounded once.

A run with a constant learning rate whose last checkpoints are averaged is about one whose rate decayed over them: with
w_j the decay's multiplier from the j-th of n checkpoints on (counted from 0, w_0 = 1, w_n = 0), the j-th has the weight
w_j - w_{j+1} (WSM, arXiv:2507.17634). A linear decay is the plain mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megalite.checkpoint.manifest import MASTER, MEAN, MODEL, REPLICA, STATE, dtype_name
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.tensors import Kind
from megalite.errors import CheckpointError
from megalite.optim.learning_rate import SHAPES
from megalite.parallel.sharding import Box

MERGED = "merged"
"""Section of an averaged checkpoint's configuration that says of what it is the average."""


def uniform(count: int) -> list[float]:
    """Return equal weights."""
    return [1.0 / count] * count


def exponential(count: int, decay: float) -> list[float]:
    """Return the weights of mean = decay * mean + (1 - decay) * checkpoint, from the first checkpoint on."""
    later = [(1.0 - decay) * decay ** (count - 1 - place) for place in range(1, count)]
    return [decay ** (count - 1), *later]


def of_decay(count: int, style: str) -> list[float]:
    """Return the weights whose average is about that of a learning rate that decays over the checkpoints."""
    heights = [SHAPES[style](place / count) for place in range(count + 1)]
    return [high - low for high, low in pairwise(heights)]


@dataclass(frozen=True)
class WeightedSum:
    """Sums of the weights of checkpoints (a `Source`), with the names and dtypes of the last one.

    A weight is read from its masters, where they are saved. Whole numbers are those of the last checkpoint.
    """

    checkpoints: Sequence[CheckpointReader]
    weights: Sequence[float]
    means: bool
    """True: take the means that runs have kept (--ema-decay) in place of weights."""

    @property
    def tensors(self) -> Mapping[str, Kind]:
        kinds = self.checkpoints[-1].tensors
        return {name: kind for name, kind in kinds.items() if name.startswith((MODEL, STATE))}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        if not values.is_floating_point():
            self.checkpoints[-1].fill(name, box, values)
            return
        total = torch.zeros(box.size, dtype=torch.float64)
        part = torch.empty_like(total)
        for checkpoint, weight in zip(self.checkpoints, self.weights, strict=True):
            checkpoint.fill(self._finest(checkpoint, name), box, part)
            total.add_(part.mul_(weight))
        values.copy_(rounded(total, values.dtype))

    def _finest(self, checkpoint: CheckpointReader, name: str) -> str:
        prefix = MEAN if self.means else MASTER
        finest = prefix + name.removeprefix(MODEL)
        return finest if name.startswith(MODEL) and finest in checkpoint.tensors else name


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float64 values in a dtype, rounded once to the nearest, ties to even.

    A cast to 16 bits goes through fp32, and would round twice: therefore fp32 is rounded towards zero, and the last bit
    of an inexact value is set, so that none becomes a tie.
    """
    if dtype.itemsize >= 4:
        return values.to(dtype)
    single = values.float()
    single = torch.where(single.abs() > values.abs(), torch.nextafter(single, torch.zeros(())), single)
    bits = single.view(torch.int32)
    odd = torch.where(single.double() == values, bits, bits | 1)
    return torch.where(values.isfinite(), odd.view(torch.float32), values.float()).to(dtype)


def check_alike(checkpoints: Sequence[CheckpointReader], *, means: bool) -> None:
    """Raise CheckpointError if checkpoints do not have the same tensors, or have no weights that can be averaged."""
    last = checkpoints[-1]
    for each in checkpoints:
        if each.manifest.config.get("adapters", {}).get("lora_rank") is not None:
            raise CheckpointError(
                f"{each.path} has adapters, whose mean is not that of the weights that they make: merge them into "
                "their base by tools/checkpoint/convert.py, and average those"
            )
    wanted = {name: kind for name, kind in last.tensors.items() if name.startswith((MODEL, STATE))}
    for each in checkpoints:
        if any(name.startswith(REPLICA + MODEL) for name in each.tensors):
            raise CheckpointError(
                f"{each.path} has weights of each replica: resume it in a run without local updates, which averages "
                "them, and save it there"
            )
        if means and not any(name.startswith(MEAN) for name in each.tensors):
            raise CheckpointError(f"--ema: {each.path} has no mean of the weights: it was saved without --ema-decay")
        found = {name: kind for name, kind in each.tensors.items() if name.startswith((MODEL, STATE))}
        for name in sorted(wanted.keys() | found.keys()):
            theirs, ours = (_shown(kinds.get(name)) for kinds in (found, wanted))
            if theirs != ours:
                raise CheckpointError(
                    f"{name} is {theirs} in {each.path} and {ours} in {last.path}: only checkpoints of one network "
                    "and precision can be averaged"
                )


def _shown(kind: Kind | None) -> str:
    return "missing" if kind is None else f"{dtype_name(kind.dtype)} {list(kind.shape)}"

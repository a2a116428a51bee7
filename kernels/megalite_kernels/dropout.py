"""Dropout by place: whether an element is dropped follows from where it stands in its sample, not from who holds it.

Each sample has a tensor [rows, width] at each random site of each layer. Its element i, row by row, is dropped where
the i-th 16 bits, little end first, of these numbers are below round(65536 * probability): the outputs of Philox-4x64-10
(Salmon et al., SC'11) with the key (seed, 0) for the counters (1, sample, layer, site), (2, sample, layer, site) and so
on, as numpy's Philox gives them. What is kept is divided by the share that is kept on average.

So the bits are the same on every device and in every dtype, and a part of the tensor is drawn without the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalite_kernels.implementation import current

GROUP = 16
"""Elements that share a counter."""
LEVELS = 1 << 16


@dataclass(frozen=True)
class DropoutMask:
    """Elements to drop: how often, and from which part of which tensor.

    Attributes:
        probability: below 1; met to 1 / 65536.
        samples: the number of each sample of the batch.
        rows: which rows of a sample's tensor are there, as runs, in order.
    """

    probability: float
    seed: int
    layer: int
    site: int
    samples: tuple[int, ...]
    rows: tuple[range, ...]

    @property
    def threshold(self) -> int:
        return min(round(LEVELS * self.probability), LEVELS - 1)

    @property
    def scale(self) -> float:
        return LEVELS / (LEVELS - self.threshold)

    def runs(self) -> Iterator[tuple[slice, range]]:
        """Yield the place in the batch of each run of rows, and the run."""
        begin = 0
        for run in self.rows:
            yield slice(begin, begin + len(run)), run
            begin += len(run)

    def runs_of_samples(self) -> Iterator[tuple[slice, range]]:
        """Yield the place in the batch of each run of consecutive samples, and the run: in training there is one."""
        begins = [i for i, sample in enumerate(self.samples) if i == 0 or sample != self.samples[i - 1] + 1]
        for begin, end in itertools.pairwise([*begins, len(self.samples)]):
            first = self.samples[begin]
            yield slice(begin, end), range(first, first + end - begin)


# ------------------------------------------------------------------------------------------------- the reference


def kept_reference(shape: torch.Size, dimension: int, mask: DropoutMask) -> Tensor:
    """1 where an element of such a batch is kept, else 0, in uint8 on the CPU; `dimension`: that of the samples."""
    kept = np.empty(shape, dtype=np.bool_)
    width = shape[-1]
    by_sample = np.moveaxis(kept, dimension, 0)
    for sample, own in zip(mask.samples, by_sample, strict=True):
        for here, run in mask.runs():
            first, skipped = divmod(run.start * width, GROUP)
            counter = np.array([first, sample, mask.layer, mask.site], dtype=np.uint64)  # one before the first
            source = np.random.Philox(counter=counter, key=np.array([mask.seed, 0], dtype=np.uint64))
            groups = -(-(skipped + len(run) * width) // GROUP)
            drawn = source.random_raw(groups * GROUP // 4).view(np.uint16)[skipped : skipped + len(run) * width]
            np.greater_equal(drawn.reshape(len(run), width), mask.threshold, out=own[here])
    return torch.from_numpy(kept.view(np.uint8))


class _DroppedReference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, dimension: int, mask: DropoutMask) -> Tensor:
        kept = kept_reference(input.shape, dimension, mask).to(input.device)
        ctx.save_for_backward(kept)
        ctx.mask = mask
        return _masked(input, kept, mask)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return _masked(grad_output, kept, ctx.mask), None, None


def _masked(input: Tensor, kept: Tensor, mask: DropoutMask) -> Tensor:
    # Scaled last, for the scale is none of bf16's numbers.
    return kept.to(input.dtype).mul_(input).mul_(mask.scale)


# ------------------------------------------------------------------------------------------------- what is called


def drop(input: Tensor, mask: DropoutMask, *, dimension: int) -> Tensor:
    """Zero some elements of [rows, samples, width], or [samples, rows, width], and scale the rest; `dimension`: that of
    the samples, 1 or 0.

    Raises:
        ValueError: the rows or samples are not as many as are said to be there.
    """
    if sum(map(len, mask.rows)) != input.shape[1 - dimension] or len(mask.samples) != input.shape[dimension]:
        raise ValueError(
            f"{len(mask.samples)} samples and the rows {mask.rows} for a tensor {list(input.shape)} of samples along "
            f"dimension {dimension}"
        )
    if input.shape[-1] % GROUP == 0 and current().runs_triton("dropout", input):
        from megalite_kernels.dropout_kernels import Dropped

        dropped: Tensor = Dropped.apply(input, dimension, mask)
    else:
        dropped = _DroppedReference.apply(input, dimension, mask)
    return dropped

"""Figures of the whole model from what each rank owns of it: norms by group of parameters, zeros of the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from megalite.optim.buckets import Bucket
from megalite.optim.layout import ParameterGroup
from megalite.optim.packed import View, chunks
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite_kernels.l2_norm import sum_of_squares


def norms(owned: Iterable[tuple[Bucket, Tensor | View]], mesh: ParallelMesh) -> dict[str, float]:
    """L2 norms by parameter group, each unique element of the model once.

    `owned`: buckets, each with a tensor of which this rank owns a slice: that slice. The sums of runs are added
    exactly, so that their order does not matter. (What a run is follows from the layout, and a sum in Triton's kernels
    is rounded to fp32 in places: two layouts may differ by some 1e-7 of the norm there.)
    """
    sums = [
        (group.name, _sum_of_squares(values[run]))
        for bucket, values in owned
        if bucket.place.counted_here
        for group, run in bucket.owned_runs
    ]
    numbers = torch.stack([number for _, number in sums]).tolist() if sums else []
    by_group: dict[str, list[float]] = {name: [] for name in ParameterGroup.NAMES}
    for (name, _), number in zip(sums, numbers, strict=True):
        by_group[name].append(number)
    return {name: math.sqrt(total) for name, total in _over_ranks(by_group, mesh).items()}


def zeros_in_gradients(buckets: Iterable[Bucket], mesh: ParallelMesh) -> int:
    """Elements of the step's gradient that are zero, over the whole model, each once and no padding."""
    count = 0
    for bucket in buckets:
        if bucket.place.counted_here:
            begin, end = bucket.owned_range
            for _, start, stop in bucket.layout.pieces(begin, end):
                part = bucket.gradient_shard[start - begin : stop - begin]
                count += part.numel() - int(part.count_nonzero())
    return int(_over_ranks({"zeros": [float(count)]}, mesh)["zeros"])


def _over_ranks(numbers: dict[str, list[float]], mesh: ParallelMesh) -> dict[str, float]:
    local = [_exact_sum(values) for values in numbers.values()]
    total = torch.tensor(local, dtype=torch.float64, device=mesh.device)
    return dict(zip(numbers, collectives.all_reduce_(total, mesh.world()).tolist(), strict=True))


def _exact_sum(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:  # finite squares of float64 gradients whose sum is not: a step to skip like any other
        return math.inf


def _sum_of_squares(values: Tensor | View) -> Tensor:
    if isinstance(values, Tensor):
        return sum_of_squares(values)
    place = values.packed.tensors()[0].device
    return torch.stack([sum_of_squares(values[part].read()) for part in chunks(len(values), place)]).sum()

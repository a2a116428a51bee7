"""Figures of the whole model from what each rank owns of it: norms by group of parameters, zeros of the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from megalite.optim.buckets import Bucket
from megalite.optim.exact_sum import sums_over_ranks
from megalite.optim.layout import ParameterGroup
from megalite.optim.packed import View, chunks
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite_kernels.l2_norm import sums_of_squares


def norms(owned: Iterable[tuple[Bucket, Tensor | View]], mesh: ParallelMesh) -> dict[str, float]:
    """L2 norms by parameter group, each unique element of the model once.

    `owned`: buckets, each with a tensor of which this rank owns a slice: that slice. Parameters and slices begin at
    whole blocks of those whose squares are summed, and blocks are added exactly: how parameters are dealt into buckets,
    and buckets and stages onto ranks, changes no bit.
    """
    blocks: dict[str, list[Tensor]] = {name: [] for name in ParameterGroup.NAMES}
    for bucket, values in owned:
        if bucket.shard_spec.counted_here:
            for group, run in bucket.owned_runs:
                blocks[group.name].append(_sums_of_squares(values[run]))
    none = torch.zeros(1, dtype=torch.float64, device=mesh.device)
    totals = sums_over_ranks([torch.cat(sums) if sums else none for sums in blocks.values()], mesh)
    return {name: math.sqrt(total) for name, total in zip(blocks, totals, strict=True)}


def zeros_in_gradients(buckets: Iterable[Bucket], mesh: ParallelMesh) -> int:
    """Elements of the step's gradient that are zero, over the whole model, each once and no padding."""
    count = 0
    for bucket in buckets:
        if bucket.shard_spec.counted_here:
            begin, end = bucket.owned_range
            for _, start, stop in bucket.layout.pieces(begin, end):
                part = bucket.gradient_shard[start - begin : stop - begin]
                count += part.numel() - int(part.count_nonzero())
    total = torch.tensor(count, device=mesh.device)
    return int(collectives.all_reduce_(total, mesh.world()))


def _sums_of_squares(values: Tensor | View) -> Tensor:
    if isinstance(values, Tensor):
        return sums_of_squares(values)
    place = values.packed.tensors()[0].device
    return torch.cat([sums_of_squares(values[part].read()) for part in chunks(len(values), place)])

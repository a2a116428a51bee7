"""Statistics of the full model, computed from owned shards: norms by parameter group, number of zero gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megalite.optim.buckets import Bucket
from megalite.optim.layout import ParameterGroup
from megalite.optim.packed import View, chunks
from megalite.parallel import collectives
from megalite.parallel.mesh import Group, ParallelMesh
from megalite_kernels.exact_sum import exact_digits, rounded, sums_of_squares


def sums_over_ranks(numbers: Sequence[Tensor], group: Group) -> list[float]:
    """Return the sum of each tensor's elements over the ranks of a group, rounded once, with the same bits on each.

    The result does not depend on the order of the additions or on the split. Each rank's device adds up digits, which
    ranks add up. The host waits for the device once, and puts the digits together.

    Args:
        numbers: float64 tensors on the mesh's device. No element may be negative. All ranks pass the same number of
            tensors; their sizes may differ.
        group: the ranks.

    Returns:
        One number per tensor. It is infinity if the sum exceeds the range of float64 or if an element is infinite, and
        NaN if an element is NaN.
    """
    return [rounded(row) for row in collectives.all_reduce_(exact_digits(numbers), group).tolist()]


def norms(owned: Iterable[tuple[Bucket, Tensor | View]], mesh: ParallelMesh) -> dict[str, float]:
    """Return the L2 norm of each parameter group. Each element of the model is counted once.

    Squares are summed per block, and the sums of blocks are added exactly. All parameters and slices start at the start
    of a block. The assignment of parameters to buckets, and of buckets and stages to ranks, therefore changes no bit.

    Args:
        owned: pairs of a bucket and the slice that this rank owns, of its gradients or of its masters.
        mesh: the mesh of ranks.
    """
    blocks: dict[str, list[Tensor]] = {name: [] for name in ParameterGroup.NAMES}
    for bucket, values in owned:
        if bucket.shard_spec.counted_here:
            for group, run in bucket.owned_runs:
                blocks[group.name].append(_sums_of_squares(values[run], mesh.device))
    none = torch.zeros(1, dtype=torch.float64, device=mesh.device)
    totals = sums_over_ranks([torch.cat(sums) if sums else none for sums in blocks.values()], mesh.world())
    return {name: math.sqrt(total) for name, total in zip(blocks, totals, strict=True)}


def zeros_in_gradients(buckets: Iterable[Bucket], mesh: ParallelMesh) -> int:
    """Return the number of zeros in the gradients of the full model. Each element is counted once, padding is not."""
    count = torch.zeros((), dtype=torch.int64, device=mesh.device)  # the host waits for the device at the end
    for bucket in buckets:
        if bucket.shard_spec.counted_here:
            begin, end = bucket.owned_range
            for _, start, stop in bucket.layout.pieces(begin, end):
                part = bucket.gradient_shard[start - begin : stop - begin]
                count += part.numel() - part.count_nonzero()
    return int(collectives.all_reduce_(count, mesh.world()))


def _sums_of_squares(values: Tensor | View, device: torch.device) -> Tensor:
    if isinstance(values, Tensor):
        return sums_of_squares(values)
    return torch.cat([sums_of_squares(values[part].read()) for part in chunks(len(values), device)])

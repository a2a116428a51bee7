"""Sum of a bucket's gradients over ranks that is also computed in another way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.extras.corruption.replicas import uncounted
from megalite.optim.accumulator import Accumulator
from megalite.optim.buckets import Bucket
from megalite.optim.reduction import Reduction
from megalite.parallel.collectives import Pending, all_gather
from megalite.parallel.mesh import Group, ParallelMesh


@dataclass(frozen=True)
class Sum:
    """Sum of what ranks have had: a flat slice."""

    total: Tensor
    sizes: Tensor
    """Sum of the absolute values: what rounding is relative to."""

    def add_(self, other: Sum) -> None:
        self.total.add_(other.total)
        self.sizes.add_(other.sizes)

    def over(self, group: Group) -> Sum:
        """Return the sum over a group, in rank order."""
        if group.size == 1:
            return self
        return Sum(_in_rank_order(self.total, group), _in_rank_order(self.sizes, group))


class SummedAgain(Reduction):
    """Plain reduction of a bucket. In steps that ask for it, the ranks' gradients are also gathered and added up.

    They are gathered before the reduction begins, since its result may take their place, slice by slice: so the memory
    for it is that of the bucket once more. On gloo the order of the sums is that of the reduction, and so are the bits.
    """

    def __init__(self, plain: Reduction, mesh: ParallelMesh, is_due: Callable[[], bool]) -> None:
        """Take the place of a reduction. `is_due`: tells at the start of a step whether it asks for the sum."""
        super().__init__(plain.spec, plain.groups)
        self._mesh, self._is_due, self._asked = mesh, is_due, False
        self.again: Sum | None = None
        """The sum over the shard group of this rank's slice, and of all micro-batches; None if it is not asked for."""

    def begin_step(self, updates: int, loss_scale: float) -> None:
        self._asked, self.again = self._is_due(), None

    def begin(self, gradients: Tensor, out: Tensor | None) -> Pending:
        if self._asked:
            with uncounted(self._mesh):
                found = self._gathered(gradients)
            if self.again is None:
                self.again = found
            else:
                self.again.add_(found)
        return super().begin(gradients, out)

    @torch.no_grad()
    def _gathered(self, gradients: Tensor) -> Sum:
        shards, own = self.groups.shards, None
        for place, values in enumerate(gradients.view(shards.size, -1)):
            total, sizes = _in_rank_order(values, shards), _in_rank_order(values.abs(), shards)
            if place == shards.rank:
                own = Sum(total, sizes)
        assert own is not None
        return own


def summed_again(bucket: Bucket) -> Sum | None:
    """Return this rank's slice of a bucket's gradients, summed again over all ranks and uses; None: not asked for.

    Called by all ranks that hold a part of the bucket together.
    """
    sums = [_of(accumulator) for accumulator in bucket.accumulators]
    if any(each is None for each in sums):
        return None
    first, *others = (each for each in sums if each is not None)
    for other in others:
        first.add_(other)
    return first.over(bucket.accumulators[0].reduction.groups.partial)


def _of(accumulator: Accumulator) -> Sum | None:
    reduction = accumulator.reduction
    assert isinstance(reduction, SummedAgain)
    return None if reduction.again is None else reduction.again.over(reduction.groups.instances)


def _in_rank_order(values: Tensor, group: Group) -> Tensor:
    """Return the sum of [n] of each rank, in rank order, in memory of its own."""
    first, *others = all_gather(values.unsqueeze(0), group)
    total = first.clone()
    for other in others:
        total.add_(other)
    return total

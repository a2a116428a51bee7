"""PowerSGD (arXiv:1905.13727) as the sum of a bucket: matrices travel as two thin factors, vectors as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.optim.bucket_shard import BucketShardSpec
from megalite.optim.flat import owned
from megalite.optim.reduction import Reduction, ReductionGroups
from megalite.parallel import collectives
from megalite.parallel.collectives import Pending, completed
from megalite.synchronization import power
from megalite.synchronization.packer import key_of


class LowRankReduction(Reduction):
    """Sum over the ranks of a shard group. Each rank's residual is what it has, less its part of the restored sum."""

    own_slice = True

    def __init__(
        self,
        rank: int,
        warmup: int,
        dtype: torch.dtype,
        error_feedback: bool,
        spec: BucketShardSpec,
        groups: ReductionGroups,
    ) -> None:
        """Draw the first factors.

        Args:
            rank: the rank of the approximations.
            warmup: the number of updates before gradients are compressed.
            dtype: the dtype of the sums of gradients.
            error_feedback: keep what messages leave out.
            spec: the bucket's layout and this rank's slices of it.
            groups: the ranks.
        """
        super().__init__(spec, groups)
        self._warmup, self._updates, self._loss_scale = warmup, 0, 1.0
        self._total = torch.empty(0)
        device = spec.layout.slots[0].parameter.device
        self._shapes = power.matrices_of(spec.layout, rank)
        compressed = {start for ranges in self._shapes.values() for start, _ in ranges}
        self._others = [(slot.start, slot.stop) for slot in spec.layout.slots if slot.start not in compressed]
        sizes = [len(ranges) * columns * rank for (_, columns), ranges in self._shapes.items()]
        self.factor = torch.empty(sum(sizes), dtype=dtype, device=device)
        """Second factors of all matrices, one after the other, which the next step begins with."""
        self._factors = [
            part.view(len(ranges), columns, rank)
            for part, ((_, columns), ranges) in zip(self.factor.split(sizes), self._shapes.items(), strict=True)
        ]
        for number, factor in enumerate(self._factors):
            count, columns, _ = factor.shape
            factor.copy_(power.first_factor(count, columns, rank, key_of(spec.layout) + number, dtype, device))
        self.state: dict[str, Tensor] = {}
        if error_feedback and groups.shards.size > 1:
            self.state["residual"] = torch.zeros(spec.layout.length, dtype=dtype, device=device)

    def begin_step(self, updates: int, loss_scale: float) -> None:
        self._updates, self._loss_scale = updates, loss_scale
        self._total = torch.empty(0)

    def begin(self, gradients: Tensor, out: Tensor | None) -> Pending:
        if self._updates < self._warmup or not self._shapes or self.groups.shards.size == 1:
            return super().begin(gradients, out)
        if "residual" in self.state:
            gradients.add_(self.state["residual"], alpha=self._loss_scale)
        stacks = [self._stacked(gradients, shape) for shape in self._shapes]
        left = [power.project(stack, factor) for stack, factor in zip(stacks, self._factors, strict=True)]
        flat = collectives.all_reduce_async_(_flat(left), self.groups.shards)
        self._corrected = gradients

        def total() -> Tensor:
            mine = owned(self._restored(stacks, _parts(flat.wait(), left), gradients), self.groups.shards)
            return mine if out is None else out.copy_(mine)

        return Pending(None, total)

    def _restored(self, stacks: list[Tensor], left: list[Tensor], gradients: Tensor) -> Tensor:
        """Return the sum over the ranks [length], from the sums of the first factors."""
        left = [power.orthogonalize(p) for p in left]
        right = [power.project_back(stack, p) for stack, p in zip(stacks, left, strict=True)]
        sent = [*right, *(gradients[start:stop] for start, stop in self._others)]
        summed = _parts(collectives.all_reduce_(_flat(sent), self.groups.shards), sent)
        self._next = summed[: len(right)]
        self._total = total = torch.zeros_like(gradients)
        for (start, stop), values in zip(self._others, summed[len(right) :], strict=True):
            total[start:stop] = values
        for ranges, p, q in zip(self._shapes.values(), left, self._next, strict=True):
            for (start, stop), matrix in zip(ranges, power.restored(p, q), strict=True):
                total[start:stop] = matrix.reshape(-1)
        return total

    def begin_gather(self, shard: Tensor, gradients: Tensor) -> Pending:
        """Start to gather the sum; or take what this rank has restored of it, if it has not changed since."""
        total, self._total = self._total, torch.empty(0)
        if len(total) and self.shards_have_all:
            return completed(gradients.copy_(total))
        return super().begin_gather(shard, gradients)

    def apply(self) -> None:
        if not len(self._total):
            return
        for factor, following in zip(self._factors, self._next, strict=True):
            factor.copy_(following)
        if "residual" in self.state:
            for start, stop in (each for ranges in self._shapes.values() for each in ranges):
                part = self.state["residual"][start:stop]
                torch.div(self._total[start:stop], self.groups.shards.size, out=part)
                torch.sub(self._corrected[start:stop], part, out=part)
            if self._loss_scale != 1.0:
                self.state["residual"].div_(self._loss_scale)
        if self.spec.zero_stage:  # otherwise it is gathered next
            self._total = torch.empty(0)

    def _stacked(self, gradients: Tensor, shape: tuple[int, int]) -> Tensor:
        return torch.stack([gradients[start:stop].view(shape) for start, stop in self._shapes[shape]])


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in tensors])


def _parts(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return the parts of a flat tensor in the shapes of those that it was made of."""
    parts = flat.split([each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]

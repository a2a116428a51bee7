"""PowerSGD (arXiv:1905.13727) as the sum of a bucket: matrices travel as two thin factors, vectors as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.extras.synchronization import power
from megalite.extras.synchronization.packer import key_of, padding, zero
from megalite.optim.layout import BucketShardSpec
from megalite.optim.reduction import Reduction, ReductionGroups
from megalite.parallel import collectives
from megalite.parallel.collectives import Pending, completed


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
        device = spec.layout.slots[0].parameter.device
        self._matrices = power.matrices_of(spec.layout, rank)
        compressed = {start for matrices in self._matrices for start in matrices.starts}
        self._others = [(slot.start, slot.stop) for slot in spec.layout.slots if slot.start not in compressed]
        self._padding = padding(spec.layout, *spec.owned)
        sizes = [matrices.count * matrices.columns * rank for matrices in self._matrices]
        self.factor = torch.empty(sum(sizes), dtype=dtype, device=device)
        """Second factors of all matrices, one after the other, which the next step begins with."""
        self._factors = [
            part.view(matrices.count, matrices.columns, rank)
            for part, matrices in zip(self.factor.split(sizes), self._matrices, strict=True)
        ]
        for number, factor in enumerate(self._factors):
            count, columns, _ = factor.shape
            factor.copy_(power.first_factor(count, columns, rank, key_of(spec.layout) + number, dtype, device))
        self.state: dict[str, Tensor] = {}
        if error_feedback and groups.shards.size > 1:
            self.state["residual"] = torch.zeros(spec.layout.length, dtype=dtype, device=device)
        self._left: list[Tensor] = []
        self._right: list[Tensor] = []
        self._vectors: list[Tensor] = []
        """The sum of this step: both factors of all matrices, and the values of the other parameters."""

    def begin_step(self, updates: int, loss_scale: float) -> None:
        self._updates, self._loss_scale = updates, loss_scale
        self._left, self._right, self._vectors = [], [], []

    def begin(self, gradients: Tensor, out: Tensor | None) -> Pending:
        """Begin to sum the left factors. The wait also sums the rest, and returns the product's slice of this rank."""
        if self._updates < self._warmup or not self._matrices or self.groups.shards.size == 1:
            return super().begin(gradients, out)
        if "residual" in self.state:
            gradients.add_(self.state["residual"], alpha=self._loss_scale)
        views = [matrices.of(gradients) for matrices in self._matrices]
        left = [power.project(view, factor) for view, factor in zip(views, self._factors, strict=True)]
        flat = collectives.all_reduce_async_(_flat(left), self.groups.shards)
        self._corrected = gradients

        def total() -> Tensor:
            self._left = [power.orthogonalize(p) for p in _parts(flat.wait(), left)]
            right = [power.project_back(view, p) for view, p in zip(views, self._left, strict=True)]
            sent = [*right, *(gradients[start:stop] for start, stop in self._others)]
            summed = _parts(collectives.all_reduce_(_flat(sent), self.groups.shards), sent)
            self._right, self._vectors = summed[: len(right)], summed[len(right) :]
            begin, end = self.spec.owned
            return self._restore(gradients.new_empty(end - begin) if out is None else out, begin)

        return Pending(None, total)

    def _restore(self, out: Tensor, begin: int) -> Tensor:
        """Write the elements of the sum from `begin` on to `out`."""
        end = begin + len(out)
        for (start, stop), values in zip(self._others, self._vectors, strict=True):
            low, high = max(start, begin), min(stop, end)
            if low < high:
                out[low - begin : high - begin] = values[low - start : high - start]
        for matrices, p, q in zip(self._matrices, self._left, self._right, strict=True):
            for number, start in enumerate(matrices.starts):
                low, high = max(start, begin), min(start + matrices.size, end)
                if low < high:
                    power.restore_from(low - start, p[number], q[number], out=out[low - begin : high - begin])
        return zero(out, self._padding)

    def begin_gather(self, shard: Tensor, gradients: Tensor) -> Pending:
        """Start to gather the sum; or take what this rank has restored of it, if it has not changed since."""
        if self._right and self.shards_have_all:
            return completed(gradients)
        return super().begin_gather(shard, gradients)

    def apply(self) -> None:
        """Keep the factors and the residual, and restore the sum in place of the gradients."""
        if not self._right:
            return
        for factor, following in zip(self._factors, self._right, strict=True):
            factor.copy_(following)
        residual = self.state.get("residual")
        if residual is not None:
            residual.copy_(self._corrected)
        elif self.spec.zero_stage or not self.shards_have_all:
            return  # the gradients are not read again
        for (start, stop), values in zip(self._others, self._vectors, strict=True):
            self._corrected[start:stop] = values
        for matrices, p, q in zip(self._matrices, self._left, self._right, strict=True):
            power.restore(p, q, out=matrices.of(self._corrected))
        if residual is None:
            return
        residual.sub_(self._corrected, alpha=1.0 / self.groups.shards.size)
        for start, stop in self._others:  # nothing is left of these, whatever a checkpoint of another compression had
            residual[start:stop].zero_()
        if self._loss_scale != 1.0:
            residual.div_(self._loss_scale)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in tensors])


def _parts(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return the parts of a flat tensor in the shapes of those that it was made of."""
    parts = flat.split([each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]

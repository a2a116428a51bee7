"""Sum of gradients that travel packed.

Each rank packs the slices of its gradients, the ranks exchange them, and each owner adds up what it restores. Under
ZeRO 0 the sum is packed again and gathered, so that all ranks apply the same (as in 1-bit Adam, arXiv:2102.02888, and
the double pass of arXiv:1905.05957). Between sites, packed slices are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from megalite.extras.synchronization.packer import Packer, padding, zero
from megalite.optim.layout import BucketLayout, BucketShardSpec
from megalite.optim.reduction import Reduction, ReductionGroups
from megalite.parallel import collectives
from megalite.parallel.collectives import Pending
from megalite.parallel.mesh import Group

PackerOf = Callable[[BucketLayout, int, int], Packer]
"""Function that makes the packer of messages of a bucket's elements from the one number to the other."""


class CompressedReduction(Reduction):
    """Sum over the ranks of a site, and over the sites, packed or not."""

    own_slice = True

    def __init__(
        self,
        within: PackerOf | None,
        of_sum: PackerOf | None,
        between: PackerOf | None,
        spec: BucketShardSpec,
        groups: ReductionGroups,
    ) -> None:
        """Make the packers.

        Args:
            within: makes the one of the gradients, between the ranks of `groups.shards`; None: they are not packed.
            of_sum: makes the one of their sum, which is gathered under ZeRO 0.
            between: makes the one of the sums between sites, `groups.instances`.
            spec: the bucket's layout and this rank's slices of it.
            groups: the ranks.
        """
        super().__init__(spec, groups)
        layout, own, several = spec.layout, spec.owned, groups.shards.size > 1
        packers = {
            "gradients": within(layout, 0, layout.length) if within and several else None,
            "sum": of_sum(layout, *own) if of_sum and several and spec.zero_stage == 0 else None,
            "sites": between(layout, *own) if between and groups.instances.size > 1 else None,
        }
        self.packers = {name: packer for name, packer in packers.items() if packer is not None}
        """Packers by what they pack: the gradients, their sum, or the sums between sites."""
        self._padding, self._padding_of_slice = padding(layout, 0, layout.length), padding(layout, *own)

    def _packer(self, name: str) -> Packer | None:
        """Return the packer of these messages, if they are packed in this step."""
        packer = self.packers.get(name)
        return packer if packer is not None and packer.packs else None

    def begin_step(self, updates: int, loss_scale: float) -> None:
        for packer in self.packers.values():
            packer.begin_step(updates, loss_scale)

    def begin(self, gradients: Tensor, out: Tensor | None) -> Pending:
        """Begin to send packed gradients to the ranks of their slices. The wait returns the sum of this rank's."""
        packer, shards = self._packer("gradients"), self.groups.shards
        if packer is None:
            return super().begin(gradients, out)
        rows, each = gradients.view(shards.size, -1), [1] * shards.size
        received = collectives.all_to_all_rows_async(packer.pack(rows), each, each, shards)

        def total() -> Tensor:
            summed = zero(packer.sum(received.wait(), rows.shape[1], rows.dtype), self._padding_of_slice)
            return summed if out is None else out.copy_(summed)

        return Pending(None, total)

    def sum_over_instances(self, shard: Tensor) -> Tensor:
        packer = self._packer("sites")
        if packer is None:
            return super().sum_over_instances(shard)
        return packed_sum(packer, shard, self._padding_of_slice, self.groups.instances).wait()

    def complete(self, shard: Tensor) -> None:
        """Replace the sum by what is left of it after packing, which all ranks are going to apply."""
        packer = self._packer("sum")
        if packer is not None:
            self._packed_sum = packer.pack(shard.clone()[None])
            restored = packer.restore(self._packed_sum, len(shard), shard.dtype)
            shard.copy_(zero(restored[0], self._padding_of_slice))

    def apply(self) -> None:
        for packer in self.packers.values():
            packer.keep()

    def begin_gather(self, shard: Tensor, gradients: Tensor) -> Pending:
        """Begin to gather the sum that `complete` packed. The wait writes all slices into `gradients`."""
        packer = self._packer("sum")
        if packer is None:
            return super().begin_gather(shard, gradients)
        gathered = collectives.all_gather_async(self._packed_sum, self.groups.shards)
        del self._packed_sum

        def restored() -> Tensor:
            rows = packer.restore(gathered.wait(), len(shard), shard.dtype)
            return zero(gradients.copy_(rows.view(-1)), self._padding)

        return Pending(None, restored)


class PackedSum:
    """Sum over replicas of what each of them has packed of a slice of a bucket."""

    def __init__(self, packer: Packer, padding: Sequence[slice], replicas: Group) -> None:
        """Describe the sum. `padding`: the elements of the slice that belong to no weight."""
        self.packer, self._padding, self._replicas = packer, padding, replicas

    def __call__(self, values: Tensor, number: int) -> Pending:
        """Start to sum the values in place. `number`: that of this sum, which differs from those of others."""
        self.packer.begin_step(number, 1.0)
        if not self.packer.packs:
            return collectives.all_reduce_async_(values, self._replicas)
        pending = packed_sum(self.packer, values, self._padding, self._replicas)
        self.packer.keep()
        return pending


def packed_sum(packer: Packer, values: Tensor, padding: Sequence[slice], group: Group) -> Pending:
    """Start to sum a slice of a bucket, in place, of what each rank of a group packs, with zeros in its padding."""
    gathered = collectives.all_gather_async(packer.pack(values.clone()[None]), group)

    def total() -> Tensor:
        return zero(values.copy_(packer.sum(gathered.wait(), len(values), values.dtype)), padding)

    return Pending(None, total)

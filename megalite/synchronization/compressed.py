"""Sum of gradients that travel packed, with error feedback: what a message leaves out is added to the next one.

Each rank packs the slices of its gradients, the ranks exchange them, and each owner adds up what it restores. Under
ZeRO 0 the sum is packed again and gathered, so that all ranks apply the same (as in 1-bit Adam, arXiv:2102.02888, and
the double pass of arXiv:1905.05957). Between sites, the packed slices are gathered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from megalite.optim.bucket_shard import BucketShardSpec
from megalite.optim.layout import BucketLayout
from megalite.optim.reduction import Reduction, ReductionGroups
from megalite.parallel import collectives
from megalite.parallel.collectives import Pending
from megalite.synchronization.compressor import Compressor

RESIDUAL, OF_SITES, OF_SUM = "residual", "residual_of_sites", "residual_of_sum"
"""Names of the residuals of a rank's gradients, of its slice between sites, and of its slice of the sum."""
CompressorAt = Callable[[int], Compressor]
"""Function from the number of applied updates to the compressor of the next step."""


@dataclass(frozen=True)
class Levels:
    """Compressors of the levels of a sum; None for one that is not compressed.

    Attributes:
        within: between the ranks of a shard group.
        again: for the sum, which is gathered under ZeRO 0.
        between: between sites.
        warmup: number of updates before gradients are compressed.
    """

    within: CompressorAt | None
    again: CompressorAt | None
    between: CompressorAt | None
    warmup: int = 0

    def within_at(self, updates: int) -> Compressor | None:
        return self._at(self.within, updates)

    def again_at(self, updates: int) -> Compressor | None:
        return self._at(self.again, updates)

    def between_at(self, updates: int) -> Compressor | None:
        return self._at(self.between, updates)

    def _at(self, compressor: CompressorAt | None, updates: int) -> Compressor | None:
        return None if compressor is None or updates < self.warmup else compressor(updates)


@dataclass
class Sent:
    """What a message was made from, until it is known that the step is applied.

    Attributes:
        corrected: the values with the residual [parts, length].
        restored: function that returns what the receivers have got of them, in the same shape.
    """

    corrected: Tensor
    restored: Callable[[], Tensor]


class CompressedReduction(Reduction):
    """Sum over the ranks of a site, and over the sites, each with a compressor of its own or none."""

    own_slice = True

    def __init__(
        self,
        levels: Levels,
        spec: BucketShardSpec,
        groups: ReductionGroups,
        *,
        dtype: torch.dtype,
        error_feedback: bool = True,
    ) -> None:
        """Allocate the residuals.

        Args:
            levels: the compressors.
            spec: the bucket's layout and this rank's slices of it.
            groups: the ranks.
            dtype: the dtype of the sums of gradients.
            error_feedback: keep what messages leave out.
        """
        super().__init__(spec, groups)
        self.levels, self._key = levels, key_of(spec.layout)
        self._updates, self._loss_scale = 0, 1.0
        self._packed_sum = torch.empty(0)
        self.residuals: dict[str, Tensor] = {}
        """Residuals without the loss scale: of the gradients, of the slice between sites, of the slice of the sum."""
        if error_feedback:
            length, own = spec.layout.length, spec.layout.length // spec.shards
            lengths = {
                RESIDUAL: length if levels.within is not None and groups.shards.size > 1 else 0,
                OF_SITES: own if levels.between is not None and groups.instances.size > 1 else 0,
                OF_SUM: own if levels.within is not None and self._gathers else 0,
            }
            device = spec.layout.slots[0].parameter.device
            self.residuals = {
                name: torch.zeros(size, dtype=dtype, device=device) for name, size in lengths.items() if size
            }
        self._sent: dict[str, Sent] = {}

    @property
    def _gathers(self) -> bool:
        """True if the slices of the sum are gathered: under ZeRO 0."""
        return self.spec.zero_stage == 0 and self.groups.shards.size > 1

    def begin_step(self, updates: int, loss_scale: float) -> None:
        self._updates, self._loss_scale = updates, loss_scale
        self._sent.clear()

    def begin(self, gradients: Tensor, out: Tensor | None) -> Pending:
        compressor, shards = self.levels.within_at(self._updates), self.groups.shards
        if compressor is None or shards.size == 1:
            return super().begin(gradients, out)
        rows = gradients.view(shards.size, -1)
        self._correct(RESIDUAL, rows)
        each = [1] * shards.size
        packed = self._pack(RESIDUAL, compressor, rows)
        received = collectives.all_to_all_rows_async(packed, each, each, shards)
        key, length = self._key_of_step, rows.shape[1]

        def total() -> Tensor:
            summed = self._without_padding(compressor.sum(received.wait(), length, gradients.dtype, key))
            return summed if out is None else out.copy_(summed)

        return Pending(None, total)

    def sum_over_instances(self, shard: Tensor) -> Tensor:
        compressor, sites = self.levels.between_at(self._updates), self.groups.instances
        if compressor is None or sites.size == 1:
            return super().sum_over_instances(shard)
        rows = shard.clone()[None]
        self._correct(OF_SITES, rows)
        gathered = collectives.all_gather(self._pack(OF_SITES, compressor, rows), sites)
        summed = compressor.sum(gathered, len(shard), shard.dtype, self._key_of_step)
        return shard.copy_(self._without_padding(summed))

    def complete(self, shard: Tensor) -> None:
        """Replace the sum by what is left of it after packing, which all ranks are going to apply."""
        compressor = self.levels.again_at(self._updates)
        if compressor is None or not self._gathers:
            return
        rows = shard.clone()[None]
        self._correct(OF_SUM, rows)
        self._packed_sum = self._pack(OF_SUM, compressor, rows)
        restored = compressor.restore(self._packed_sum, len(shard), shard.dtype, self._key_of_step)
        shard.copy_(self._without_padding(restored[0]))

    def begin_gather(self, shard: Tensor, gradients: Tensor) -> Pending:
        compressor = self.levels.again_at(self._updates)
        if compressor is None or not self._gathers:
            return super().begin_gather(shard, gradients)
        gathered, key = collectives.all_gather_async(self._packed_sum, self.groups.shards), self._key_of_step

        def restored() -> Tensor:
            gradients.copy_(compressor.restore(gathered.wait(), len(shard), shard.dtype, key).view(-1))
            for start, stop in self._padding(0, self.spec.layout.length):
                gradients[start:stop].zero_()
            return gradients

        return Pending(None, restored)

    def apply(self) -> None:
        for name, sent in self._sent.items():
            self._keep(name, sent.corrected, sent.restored())
        self._sent.clear()

    def _correct(self, name: str, rows: Tensor) -> None:
        """Add the residual of earlier messages to the values [parts, length] of the next one."""
        if name in self.residuals:
            rows.add_(self.residuals[name].view(rows.shape), alpha=self._loss_scale)

    def _keep(self, name: str, corrected: Tensor, restored: Tensor) -> None:
        """Set the residual to what the receivers have not got."""
        torch.sub(corrected, restored, out=self.residuals[name].view(corrected.shape)).div_(self._loss_scale)

    def _pack(self, name: str, compressor: Compressor, rows: Tensor) -> Tensor:
        key = self._key_of_step
        packed = compressor.pack(rows, key)
        if name in self.residuals:
            self._sent[name] = Sent(rows, lambda: compressor.restore(packed, rows.shape[1], rows.dtype, key))
        return packed

    @property
    def _key_of_step(self) -> int:
        return self._key + self._updates

    def _without_padding(self, shard: Tensor) -> Tensor:
        """Set the elements of the owned slice to zero that belong to no weight: a compressor may have made noise."""
        begin, end = self.spec.owned
        for start, stop in self._padding(begin, end):
            shard[start - begin : stop - begin].zero_()
        return shard

    def _padding(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges within [begin, end) of the bucket that belong to no weight."""
        position = begin
        for _, start, stop in sorted(self.spec.layout.pieces(begin, end), key=itemgetter(1)):
            if position < start:
                yield position, start
            position = stop
        if position < end:
            yield position, end


def key_of(layout: BucketLayout) -> int:
    """Return a number of the bucket that is the same on all ranks that have it, and differs between buckets."""
    names = [piece.tensor.name for slot in layout.slots for piece in slot.parameter.sharding.pieces]
    return int.from_bytes(hashlib.blake2b("\n".join(names).encode(), digest_size=7).digest(), "little")

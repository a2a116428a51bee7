"""1-bit Adam (arXiv:2102.02888): after a warm-up of Adam its second moment is frozen, and its momentum compressed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from megalite.config.optimizer import OptimizerConfig
from megalite.extras.synchronization.compressed import CompressedReduction
from megalite.extras.synchronization.packer import Packer, Packing
from megalite.optim.layout import BucketLayout
from megalite.optim.learning_rate import Rates
from megalite.optim.shard import Segment, Shard
from megalite.optim.update_rule import UpdateRule

PART = 1 << 22
"""Number of elements that are updated at a time, which bounds the memory of temporary tensors."""


class MomentumPacker(Packer):
    """Packer of a rank's share of the next momentum, which the update rule gets in place of the gradients.

    A share is beta1 times the present momentum, divided by the number of shares, and 1 - beta1 times the rank's own
    gradient.
    """

    def __init__(self, beta1: float, packing: Packing, layout: BucketLayout, begin: int, end: int) -> None:
        super().__init__(packing, layout, begin, end)
        self._beta1 = beta1
        self.segments: Sequence[Segment] = ()
        """Segments of the whole bucket, with the momentum. Of a bucket's accumulators only the first has them."""
        self.shares = 1
        """Number of ranks whose shares are added up."""

    def _correct(self, values: Tensor) -> None:
        values.mul_(1.0 - self._beta1)
        for segment in self.segments:
            own = values.view(-1)[segment.start : segment.stop]
            own.add_(segment.tensors["exp_avg"], alpha=self._beta1 / self.shares * self._loss_scale)
        super()._correct(values)


class OneBitAdam(UpdateRule):
    """Adam, and after the warm-up steps along its momentum, divided by the frozen second moment.

    Where that is zero, as no gradient has been seen in the warm-up, weights stay as they are.
    """

    def __init__(self, adam: UpdateRule, shards: Iterable[Shard], config: OptimizerConfig, warmup: int) -> None:
        """Show the momentum to the reductions.

        Args:
            adam: the rule of the warm-up.
            shards: all shards of this rank, none of which is a part of a bucket.
            config: the hyperparameters.
            warmup: the number of updates in the warm-up.
        """
        self._adam, self._shards, self._config, self._warmup = adam, list(shards), config, warmup
        for shard in self._shards:
            reduction = shard.bucket.accumulators[0].reduction
            groups = reduction.groups
            for packer in reduction.packers.values() if isinstance(reduction, CompressedReduction) else ():
                if isinstance(packer, MomentumPacker):
                    packer.segments = shard.segments
                    packer.shares = groups.shards.size * groups.partial.size

    def update(self, rates: Rates, step: int, factor: float) -> None:
        """Update by Adam in the warm-up. After it the gradients are averages already, and second moments stay."""
        if step <= self._warmup:
            self._adam.update(rates, step, factor)
            return
        config = self._config
        bias, bias_of_squares = 1.0 - config.adam_beta1**step, 1.0 - config.adam_beta2**self._warmup
        for segment in (segment for shard in self._shards for segment in shard.segments):
            rate, decay = rates.of(segment.group)
            for part in segment.parts(PART):
                average = part.tensors["exp_avg"]
                average.copy_(part.gradients).mul_(factor)
                average.masked_fill_(part.tensors["exp_avg_sq"] == 0.0, 0.0)
                root = (part.tensors["exp_avg_sq"] / bias_of_squares).sqrt_().add_(config.adam_eps)
                part.master.mul_(1.0 - rate * decay).addcdiv_(average, root, value=-rate / bias)
            segment.round_parameters()

"""Lion (arXiv:2302.06675): every element moves by the learning rate, in the direction of the sign of a momentum."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.learning_rate import Rates
from megalite.optim.shard import Segment
from megalite.optim.update_rule import UpdateRule

PART = 1 << 22
"""Number of elements that are updated at a time, which bounds the memory of the signs."""


class Lion(UpdateRule):
    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None:
        self._segments, self._config = segments, config

    def update(self, rates: Rates, step: int, factor: float) -> None:
        for segment in self._segments:
            rate, decay = rates.of(segment.group)
            for part in segment.parts(PART):
                gradients, average = part.wide_gradients(factor), part.tensors["exp_avg"]
                sign = average.lerp(gradients, 1 - self._config.lion_beta1).sign_()
                part.master.mul_(1 - rate * decay).sub_(sign, alpha=rate)
                average.lerp_(gradients, 1 - self._config.lion_beta2)
            segment.round_parameters()

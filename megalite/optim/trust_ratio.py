"""LARS (arXiv:1708.03888) and LAMB (arXiv:1904.00962): each matrix has a learning rate in proportion to its own norm.

Biases and norms, the tensors without weight decay, have the ratio 1: LARS is SGD for them, and LAMB is Adam.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence

from torch import Tensor

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.learning_rate import Rates
from megalite.optim.shard import Segment, Shard
from megalite.optim.tensor_groups import messages, norms, tensor_groups
from megalite.optim.update_rule import UpdateRule
from megalite.parallel.mesh import ParallelMesh

PART = 1 << 22
"""Number of elements that are treated at a time where norms are not concerned, which bounds the memory of copies."""


class TrustRatio(UpdateRule):
    """Update rule that multiplies the rate of each whole tensor by a ratio of two norms."""

    def __init__(self, shards: Sequence[Shard], mesh: ParallelMesh, config: OptimizerConfig) -> None:
        self._config, self._mesh = config, mesh
        self._segments = [segment for shard in shards for segment in shard.segments]
        self._tensors = [whole for _, few in messages(tensor_groups(shards, mesh)) for whole in few]
        """Tensors with weight decay, in the order of their norms."""

    def update(self, rates: Rates, step: int, factor: float) -> None:
        """Update the weights: those with decay by the ratio of two norms of whole tensors, the others without."""
        for segment in self._segments:
            segment.gradients.mul_(factor)
            for part in segment.parts(PART):
                self.add_gradients(part)
        weights = norms(self._tensors, lambda segment: segment.master, self._mesh)
        updates = norms(self._tensors, lambda segment: self.compared(segment, rates.weight_decay, step), self._mesh)
        for whole, weight, update in zip(self._tensors, weights, updates, strict=True):
            for run in whole.runs:
                rate, decay = rates.of(run.segment.group)
                self.apply(run.segment, rate * self.ratio(weight, update, decay), decay, step)
        for segment in self._segments:
            if not segment.group.weight_decay:
                for part in segment.parts(PART):
                    self.apply(part, rates.of(segment.group)[0], 0.0, step)
            segment.round_parameters()

    def collectives(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for kind in ("weights", "updates"):
            for group, _ in messages(self._tensors):
                yield f"norms of {kind}", group.ranks

    @abstractmethod
    def add_gradients(self, segment: Segment) -> None:
        """Update the state with the gradients, before norms are known."""

    @abstractmethod
    def compared(self, segment: Segment, decay: float, step: int) -> Tensor:
        """Return the values whose norm the ratio compares with that of the weights."""

    @abstractmethod
    def ratio(self, weight: float, compared: float, decay: float) -> float:
        """Return the factor of the learning rate, from the two norms and the weight decay."""

    @abstractmethod
    def apply(self, segment: Segment, rate: float, decay: float, step: int) -> None:
        """Update the masters with this learning rate."""


class Lars(TrustRatio):
    """SGD whose momentum adds up steps that have their rates already, as in the paper's algorithm 1."""

    def add_gradients(self, segment: Segment) -> None:
        pass

    def compared(self, segment: Segment, decay: float, step: int) -> Tensor:
        return segment.wide_gradients(1.0)

    def ratio(self, weight: float, compared: float, decay: float) -> float:
        return self._config.lars_coefficient * weight / (compared + decay * weight) if weight and compared else 1.0

    def apply(self, segment: Segment, rate: float, decay: float, step: int) -> None:
        momentum = segment.tensors["momentum_buffer"].mul_(self._config.lars_momentum)
        momentum.add_(segment.wide_gradients(1.0), alpha=rate).add_(segment.master, alpha=rate * decay)
        segment.master.sub_(momentum)


class Lamb(TrustRatio):
    """AdamW whose update of each whole tensor, decay included, has a norm in proportion to the tensor's."""

    def add_gradients(self, segment: Segment) -> None:
        gradients, (average, squares) = segment.wide_gradients(1.0), segment.tensors.values()
        average.lerp_(gradients, 1 - self._config.adam_beta1)
        squares.mul_(self._config.adam_beta2).addcmul_(gradients, gradients, value=1 - self._config.adam_beta2)

    def compared(self, segment: Segment, decay: float, step: int) -> Tensor:
        average, squares = segment.tensors.values()
        first, second = (1 - beta**step for beta in (self._config.adam_beta1, self._config.adam_beta2))
        root = squares.sqrt().div_(math.sqrt(second)).add_(self._config.adam_eps)
        return (average / first).div_(root).add_(segment.master, alpha=decay)

    def ratio(self, weight: float, compared: float, decay: float) -> float:
        return weight / compared if weight and compared else 1.0

    def apply(self, segment: Segment, rate: float, decay: float, step: int) -> None:
        segment.master.sub_(self.compared(segment, decay, step), alpha=rate)

"""Largest logits of attention in a step, and which weights a clip of them scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalite.parallel import collectives
from megalite.parallel.context import ParallelContext
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sequence import SequenceLayout
from megalite_kernels.largest_logits import Visible, largest_logits


class LogitClip(NamedTuple):
    """QK-Clip of attention (arXiv:2507.20534).

    Attributes:
        threshold: the logit above which weights are scaled; infinity: logits are only measured.
        alpha: share of the query's weights in the scaling, as an exponent.
    """

    threshold: float = math.inf
    alpha: float = 0.5


class ScaledRows(NamedTuple):
    """Rows of a logical tensor [heads or groups, rows, ...] to which logits are proportional.

    Attributes:
        tensor: its name.
        rows: the rows, of each head or group.
        power: exponent of the head's factor by which they are scaled.
    """

    tensor: str
    rows: range
    power: float


class LargestLogits(nn.Module):
    """Largest logit of each head of an attention layer over all micro-batches of a step, in training.

    It takes each logit as often as forward computes it: a recomputed forward changes no maximum. Register it as a
    submodule.

    Attributes:
        clip: what becomes of large logits.
        scaled: the rows of weights that the clip scales.
        group: the ranks that have the layer, each for some of its tokens and heads.
        own: [heads of the model], fp32 or wider: those of this rank since the step began; -inf for other heads.
    """

    def __init__(
        self, context: ParallelContext, clip: LogitClip, heads: int, groups: int, scaled: Sequence[ScaledRows]
    ) -> None:
        """Begin without logits. `groups`: the groups of consecutive heads, each of which has one factor."""
        super().__init__()
        self.clip, self.groups, self.scaled = clip, groups, scaled
        self.group = context.mesh.group("dp", "cp", "tp")
        dtype = torch.promote_types(context.dtype, torch.float32)
        self.own = torch.full((heads,), -math.inf, dtype=dtype, device=context.mesh.device)

    def of_samples(self, lengths: Tensor | None) -> Measure:
        """Return what takes in the logits of a micro-batch. `lengths`: see `MicroBatch`."""
        return Measure(self, lengths)

    def begin_step(self) -> None:
        """Forget all logits."""
        self.own.fill_(-math.inf)

    def factors(self, largest: Sequence[float]) -> list[float]:
        """Return the factor of each group's logits, from the largest logit of each head on all ranks."""
        each, threshold = len(largest) // self.groups, self.clip.threshold
        of_groups = [max(largest[first : first + each]) for first in range(0, len(largest), each)]
        return [threshold / logit if threshold < logit < math.inf else 1.0 for logit in of_groups]


@dataclass(frozen=True)
class Measure:
    """Measure of the logits of a micro-batch."""

    layer: LargestLogits
    lengths: Tensor | None

    def __call__(
        self,
        heads: range,
        layout: SequenceLayout,
        query: Tensor,
        key: Tensor,
        mask: Visible,
        scale: float | None,
        rows: slice = slice(None),
    ) -> None:
        """Take in logits of these heads of the model, unless the network evaluates.

        Args:
            layout: indices of the tokens of this rank, or of those that exchange heads, in their samples.
            rows: which of these tokens the queries are.

        The other arguments are those of `largest_logits`. Queries that only fill up a sample do not count: a rank with
        fewer micro-batches has some more of them.
        """
        if not self.layer.training:
            return
        counted, own = None, self.layer.own[heads.start : heads.stop]
        if self.lengths is not None:
            counted = layout.places(query.device)[rows] < self.lengths.unsqueeze(1)
        own.copy_(torch.maximum(own, largest_logits(query, key, mask, scale, counted)))


def largest_logits_of(networks: Iterable[nn.Module]) -> list[LargestLogits]:
    """Return each `LargestLogits` of the networks once, in registration order."""
    return [each for network in networks for each in network.modules() if isinstance(each, LargestLogits)]


def largest_of_all(networks: Iterable[nn.Module], mesh: ParallelMesh) -> float:
    """Return the largest logit since the step began, of all layers and ranks. Called by all ranks together."""
    own = [each.own.max().double() for each in largest_logits_of(networks)]
    none = torch.full((), -math.inf, dtype=torch.float64, device=mesh.device)
    return float(collectives.all_reduce_(torch.stack([none, *own]).max(), mesh.world(), "max"))

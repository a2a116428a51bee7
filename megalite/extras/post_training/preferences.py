"""Losses of pairs of responses, DPO's and IPO's, with samples cut or whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.preferences import PreferenceConfig
from megalite.data.loader import MicroBatchArrays
from megalite.model.batch import MicroBatch
from megalite.parallel import collectives
from megalite.parallel.device import moved
from megalite.parallel.mesh import Group
from megalite.parallel.stage import LossTerm, TermSums

CHOSEN, REJECTED = "rewards/chosen", "rewards/rejected"
MARGINS, ACCURACY = "rewards/margins", "rewards/accuracies"


@dataclass(frozen=True)
class PairBatch(MicroBatch):
    """Micro-batch of pairs. It has r responses, of which 2 i and 2 i + 1 are a pair.

    Attributes:
        slots: [batch, sequence] int64, the response of each label of this rank's part; -1: of none.
        responses: [r] int64, the numbers of the responses in the data, on the host.
        lengths_of: [r] float64, number of the labels of each response.
        reference: [r] float64, the reference's log-probabilities of the responses; None: they are not known yet.
    """

    slots: Tensor | None = None
    responses: np.ndarray | None = None
    lengths_of: Tensor | None = None
    reference: Tensor | None = None

    @property
    def pairs(self) -> int:
        assert self.responses is not None
        return len(self.responses) // 2


def pair_batch(micro_batch: MicroBatch, arrays: MicroBatchArrays) -> PairBatch:
    """Return a micro-batch with its pairs. `arrays`: the whole samples that it was made from."""
    counted = (arrays["responses"] >= 0) & (arrays["loss_mask"] > 0)
    # A pair may stand in two samples of a micro-batch: behind the end of one epoch, and in the next.
    keys = np.stack([np.broadcast_to(np.arange(len(counted))[:, None], counted.shape), arrays["responses"]])[:, counted]
    found, places, lengths = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    slots = np.full(counted.shape, -1)
    slots[counted] = places.reshape(-1)
    device = micro_batch.tokens.device
    return PairBatch(
        **{each.name: getattr(micro_batch, each.name) for each in fields(MicroBatch)},
        slots=moved(micro_batch.layout.own(torch.from_numpy(slots)), device),
        responses=found[1],
        lengths_of=moved(torch.from_numpy(lengths.astype(np.float64)), device),
    )


class _SumOfParts(torch.autograd.Function):
    """Sum over context-parallel ranks. All of them go on with it alike, so each part has its gradient."""

    @staticmethod
    def forward(context: Any, part: Tensor, group: Group) -> Tensor:
        return collectives.all_reduce_(part.clone(), group)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def of_responses(log_probabilities: Tensor, batch: PairBatch, group: Group) -> Tensor:
    """Return the sums of log-probabilities [batch, sequence] over each response, [r] in fp64.

    `group`: the context-parallel ranks, which have the other parts.
    """
    assert batch.slots is not None
    every = torch.arange(2 * batch.pairs, device=batch.slots.device).view(-1, 1, 1)
    apart = torch.where(batch.slots == every, log_probabilities, 0.0)  # adds in one order, which index_add does not
    own = apart.sum((1, 2), dtype=torch.float64)
    return own if group.size == 1 else _SumOfParts.apply(own, group)


def preference_sums(options: PreferenceConfig, batch: PairBatch, own: Tensor) -> TermSums:
    """Return the sums over the pairs of the loss and of what is recorded.

    `own`: log-probabilities of the responses under the network that is trained, [r].
    """
    assert batch.reference is not None
    assert batch.lengths_of is not None
    gains = own - batch.reference
    if options.preference_loss == "ipo":
        gains = gains / batch.lengths_of
    chosen, rejected = gains.view(-1, 2).unbind(1)
    beta, smoothing, margin = options.preference_beta, options.preference_label_smoothing, chosen - rejected
    if options.preference_loss == "ipo":
        losses = (margin - 1 / (2 * beta)) ** 2
    else:
        right, wrong = F.logsigmoid(beta * margin), F.logsigmoid(-beta * margin)
        losses = -(1 - smoothing) * right - smoothing * wrong
    recorded: Mapping[str, Tensor] = {
        CHOSEN: beta * chosen,
        REJECTED: beta * rejected,
        MARGINS: beta * margin,
        ACCURACY: (margin > 0).double(),
    }
    return {loss_name(options): losses.sum(), **{name: each.detach().sum() for name, each in recorded.items()}}


def loss_name(options: PreferenceConfig) -> str:
    """Return the name under which the loss is recorded."""
    return f"{options.preference_loss}_loss"


def preference_terms(options: PreferenceConfig) -> tuple[LossTerm, ...]:
    """Return the terms of the loss: means over the pairs of the global batch, of which only the first has a weight."""

    def count(batch: PairBatch) -> Tensor:
        return torch.tensor(batch.pairs, dtype=torch.float64)

    names = (CHOSEN, REJECTED, MARGINS, ACCURACY)
    axes = ("dp",)  # context-parallel ranks have the same sums
    recorded = [LossTerm(name, count, weight=0.0, axes=axes, count_axes=axes) for name in names]
    return (LossTerm(loss_name(options), count, axes=axes, count_axes=axes), *recorded)

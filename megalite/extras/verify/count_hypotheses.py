"""Explanations by counts: the loss is divided by the tokens of a part of the step, not by those of all of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megalite.extras.verify.cuts import tokens_of
from megalite.extras.verify.judgement import Judgement
from megalite.extras.verify.suspect import Hypothesis, Suspect


def counts(suspect: Suspect) -> Iterator[Hypothesis]:
    """Yield that losses are means over parts of the step, of which the mean is taken."""
    first = suspect.first
    if first.entry.role == "parameter" or (first.point is not None and not first.point.role.endswith("gradient")):
        return
    scales = {each["lm_loss"] for each in suspect.recall.walk.multipliers}
    if len(scales) > 1 or (suspect.size("cp") > 1 and first.point is not None and not _is_last(first.point.module)):
        return  # the right loss is a mean of means itself; and a rank's tokens depend on those of others
    masks = [torch.from_numpy(each["loss_mask"]) for each in suspect.replay.batches]
    per_rank, ranks = int(suspect.sizes.get("micro-batches", 1)), suspect.size("cp")
    places = [tokens_of((at, ranks), masks[0].shape[1]) for at in range(ranks)]
    of_parts = torch.tensor([[float(mask[:, own].sum()) for own in places] for mask in masks])
    found: dict[str, Tensor] = {"micro-batch": of_parts.sum(1, keepdim=True), "context-parallel rank": of_parts}
    if len(masks) % per_rank == 0:
        of_replicas = of_parts.sum(1).view(-1, per_rank).sum(1, keepdim=True)
        found["data-parallel rank"] = of_replicas.repeat_interleave(per_rank, 0)
    tried = [torch.ones_like(of_parts)]
    for what, sums in found.items():
        mean = float(of_parts.sum()) / len(masks) * (per_rank if what == "data-parallel rank" else 1) / sums.shape[1]
        factors = torch.where(sums > 0, mean / sums.clamp(min=1.0), 0.0).expand_as(of_parts)
        if not any(torch.equal(factors, each) for each in tried):
            tried.append(factors)
            text = f"each {what} divides by the number of its own tokens that count, not by that of the step"
            yield Hypothesis("count", text, suspect.ratio(partial(_expected, suspect, factors)))


def _is_last(module: str) -> bool:
    return module.startswith("head")


def _expected(suspect: Suspect, factors: Tensor, judgement: Judgement) -> Tensor:
    """Return what a rank would have recorded. `factors`: [micro-batches, context-parallel ranks], those of losses."""
    recall, (rank, ranks) = suspect.recall, suspect.place(judgement, "cp")
    if judgement.point is not None:
        return suspect.truth(judgement) * factors[recall.number_of(judgement.entry), rank]
    if ranks == 1:
        return recall.gradient(judgement, lambda number: float(factors[number, 0]))
    of_ranks = [
        recall.gradient(judgement, lambda number, at=at: float(factors[number, at]), tokens=("cp", at, ranks))  # type: ignore[misc]
        for at in range(ranks)
    ]
    return torch.stack(of_ranks).sum(0)

"""Choices of experts that hang on rounding: a token whose next expert is as near may go there, and no number is wrong.

Such a token is as far from the truth as the other expert takes it, which no order of sums tells. So one more run takes
the other choice wherever rounding might, and its distance is part of what rounding explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.extras.verify.points import Point, Values, global_name
from megalite.model.gpt import GPT
from megalite.model.router import Router
from megalite_kernels.routing import choose_experts

_SURELY = 4.0
"""Distance of two scores, in root mean squares of their rounding, from which on their order is sure."""


def other_choices(network: GPT, values: Sequence[Values]) -> Mapping[int, Tensor]:
    """Return the other choice of each token, -1 where the choice is sure, by the number of the router.

    Args:
        network: a stage in fp64.
        values: the points of the stage, of the truth and of the emulated runs.

    Returns:
        [batch, sequence, topk] for each router of the stage.
    """
    found = {}
    for path, module in network.named_modules():
        point = Point(global_name(path, network.stage_layers.first_layer), "input")
        if isinstance(module, Router) and point in values[0]:
            found[module.number] = _of_router(module, [each[point].double() for each in values])
    return found


def _of_router(router: Router, inputs: Sequence[Tensor]) -> Tensor:
    """Return [batch, sequence, topk] from the router's inputs [sequence, batch, hidden]."""
    truth, *others = [F.linear(each, router.weight.double()).flatten(0, 1) for each in inputs]
    bias = None if router.expert_bias is None else router.expert_bias.values.double()
    topk, experts = router.rule.topk, truth.shape[1]
    sequence, batch = inputs[0].shape[:2]
    if topk == experts:
        return torch.full((batch, sequence, topk), -1)
    chosen = choose_experts(truth, bias, router.rule)
    further = choose_experts(truth, bias, replace(router.rule, topk=topk + 1))
    next_best = further.masked_fill((further.unsqueeze(-1) == chosen.unsqueeze(-2)).any(-1), -1).amax(-1, keepdim=True)
    scores = [each if bias is None else each.sigmoid() + bias for each in (truth, *others)]
    last = chosen.gather(1, scores[0].gather(1, chosen).argmin(-1, keepdim=True))
    gaps = [each.gather(1, last) - each.gather(1, next_best.clamp(min=0)) for each in scores]
    rounding = torch.stack([(gap - gaps[0]).square() for gap in gaps[1:]]).mean(0).sqrt() if others else 0.0 * gaps[0]
    doubtful = (gaps[0].abs() < _SURELY * rounding) & (next_best >= 0)
    changed = torch.where(chosen == last, next_best, chosen)
    return torch.where(doubtful, changed, -1).view(sequence, batch, topk).transpose(0, 1)

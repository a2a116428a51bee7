"""Routing of tokens to experts: which experts a token chooses, and their weights.

Experts are chosen by score, descending, and among equal scores by number, ascending, so that every device and layout
chooses the same for the same logits. The score is the logit z, softmax(z) over all experts, sigmoid(z), or
sqrt(softplus(z)). All of them rise with z, so without bias and groups the choice is that of z, which is not rounded. A
bias may be added to the score, which affects the choice only (arXiv:2408.15664). With groups of consecutive experts, a
token chooses only in its `group_topk` best groups; a group's score is the sum of its best `group_scores` scores
(arXiv:2412.19437).

The weights of the chosen experts, before the scaling factor:

- softmax: the softmax over the logits of the chosen experts (Mixtral, arXiv:2401.04088).
- softmax with `pre_softmax`: their part of the softmax over all experts, whose sum is below 1 (arXiv:2101.03961).
- sigmoid: their sigmoid, divided by the sum of these if there are several (arXiv:2412.19437).
- sqrtsoftplus: the same with the square root of their softplus (DeepSeek-V4).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.implementation import current
from megalite_kernels.routing_rule import LEAST_LOGIT, SMALLEST_SUM, RoutingRule, ScoreFunction

# ------------------------------------------------------------------------------------------------- the references


def _chosen(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> Tensor:
    """Return the experts of each token, best first, [tokens, topk], after all but the best groups are closed."""
    scores = logits
    if rule.score_function != "softmax":
        scores = _separate_scores(logits, rule.score_function)
    elif rule.pre_softmax:
        scores = torch.softmax(logits, dim=-1)
    if bias is not None:
        scores = scores + bias
    if rule.groups > 1:
        members = scores.unflatten(-1, (rule.groups, -1))
        best = members.sort(dim=-1, descending=True).values[..., : rule.group_scores]
        others = _first(best.sum(dim=-1), rule.groups)[..., rule.group_topk :]
        closed = torch.zeros_like(members[..., 0], dtype=torch.bool).scatter_(-1, others, True)
        scores = members.masked_fill(closed[..., None], -torch.inf).flatten(-2)
    return _first(scores, rule.topk)


def _separate_scores(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """Return scores that do not depend on the other experts' logits."""
    if score_function == "sigmoid":
        return torch.sigmoid(logits)
    # Where softplus would be rounded to 0, its root would have no slope.
    root = F.softplus(logits.clamp(min=LEAST_LOGIT), threshold=-LEAST_LOGIT).sqrt()
    return root * torch.exp(-F.relu(LEAST_LOGIT - logits) / 2)


def _first(scores: Tensor, count: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _weights(logits: Tensor, experts: Tensor, rule: RoutingRule) -> Tensor:
    if rule.score_function == "softmax":
        if rule.pre_softmax:
            weights = torch.softmax(logits, dim=-1).gather(-1, experts)
        else:
            weights = torch.softmax(logits.gather(-1, experts), dim=-1)
    else:
        weights = _separate_scores(logits.gather(-1, experts), rule.score_function)
        if rule.topk > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return weights * rule.scaling_factor


# ------------------------------------------------------------------------------------------------- public functions


def choose_experts(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> Tensor:
    """Return the experts of each token, best first: [tokens, experts] and [experts] to [tokens, topk], int64.

    There is no gradient. Logits and bias are in fp32 or wider; NaN counts as the best score.
    """
    logits = logits.detach()
    if bias is None and rule.groups == 1:  # the best scores are those of the best logits, which are not rounded
        rule = rule.unrestricted
    if current().runs_triton("routing", logits, bias):
        from megalite_kernels.routing_kernels import launch_choose

        return launch_choose(logits, bias, rule)
    return _chosen(logits, bias, rule)


def routing_weights(logits: Tensor, experts: Tensor, rule: RoutingRule) -> Tensor:
    """Return the weights of each token's experts: [tokens, experts] and [tokens, topk] to [tokens, topk]."""
    if current().runs_triton("routing", logits):
        from megalite_kernels.routing_kernels import RoutingWeights

        weights: Tensor = RoutingWeights.apply(logits, experts, rule)
        return weights
    return _weights(logits, experts, rule)


def routing_probabilities(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """Return the share of each expert in a token's scores, of which balancing losses are made: [tokens, experts]."""
    if score_function == "softmax":
        return F.softmax(logits, dim=-1)
    scores = _separate_scores(logits, score_function)
    return scores / (scores.sum(dim=-1, keepdim=True) + SMALLEST_SUM)

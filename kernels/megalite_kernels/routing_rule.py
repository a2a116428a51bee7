"""Rule by which tokens choose experts: see routing.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SMALLEST_SUM = 1e-20
"""Added to the sum of scores that are not a softmax, as in DeepSeek-V3 and Megatron-LM."""
LEAST_LOGIT = -40.0
"""Below, sqrt(softplus(z)) is exp(z / 2), to any precision in use."""


@dataclass(frozen=True)
class RoutingRule:
    """Rule by which each token chooses `topk` experts and weighs them. `group_scores`: see above."""

    topk: int
    score_function: ScoreFunction = "softmax"
    pre_softmax: bool = False
    scaling_factor: float = 1.0
    groups: int = 1
    group_topk: int = 1
    group_scores: int = 1

    @property
    def unrestricted(self) -> RoutingRule:
        """The rule that chooses by score alone, without groups; without a bias, the score function changes nothing."""
        return RoutingRule(self.topk)

from __future__ import annotations

from torch import Tensor

from museum.plain.ranks import Ranks

SETTINGS = {"cp": 2, "batch": 1, "masked": 0.5, "seed": 10}


def mean_of_rank(losses: Tensor, mask: Tensor, tokens: Tensor, ranks: Ranks) -> Tensor:
    return (losses * mask).sum() / mask.sum().clamp(min=1.0) / ranks.data.size


PATCHES = {"scale_loss": mean_of_rank}

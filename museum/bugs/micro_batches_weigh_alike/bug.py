from __future__ import annotations

from torch import Tensor

from museum.plain.ranks import Ranks

SETTINGS = {"dp": 2, "masked": 0.4}


def mean_of_means(losses: Tensor, mask: Tensor, tokens: Tensor, ranks: Ranks) -> Tensor:
    return (losses * mask).sum() / mask.sum() / (ranks.settings.micro_batches * ranks.settings.dp)


PATCHES = {"scale_loss": mean_of_means}

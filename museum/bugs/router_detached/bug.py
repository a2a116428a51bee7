from __future__ import annotations

from torch import Tensor

from museum.plain.mlp import router_probabilities

SETTINGS = {"experts": 4, "auxiliary": 0.05, "ep": 2, "dp": 2}


def gathered(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    probabilities, chosen, weights = router_probabilities(logits, top_k)
    return probabilities, chosen, weights.detach()


PATCHES = {"router_probabilities": gathered}

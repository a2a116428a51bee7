from __future__ import annotations

from torch import Tensor

from museum.plain.mlp import router_probabilities

SETTINGS = {"experts": 4}


def as_they_are(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    probabilities, chosen, _ = router_probabilities(logits, top_k)
    return probabilities, chosen, probabilities.gather(-1, chosen).to(logits.dtype)


PATCHES = {"router_probabilities": as_they_are}

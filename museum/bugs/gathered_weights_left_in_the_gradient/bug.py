from __future__ import annotations

from museum.plain.tensor_parallel import Weight

SETTINGS = {"dp": 2, "zero": True, "steps": 2, "record": (1, 2)}


def holds_the_weights(parameter: Weight) -> None:
    parameter.main_grad = parameter.detach().clone().to(parameter.main_grad.dtype)


PATCHES = {"clear_gradient": holds_the_weights}

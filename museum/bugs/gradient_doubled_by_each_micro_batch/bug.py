from __future__ import annotations

from torch import Tensor

from museum.plain.tensor_parallel import Weight

SETTINGS: dict[str, object] = {}


def add_to_itself(parameter: Tensor) -> None:
    assert isinstance(parameter, Weight)
    assert parameter.grad is not None
    parameter.main_grad = 2.0 * parameter.main_grad + parameter.grad
    parameter.grad = None


PATCHES = {"accumulate": add_to_itself}

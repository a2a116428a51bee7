from __future__ import annotations

from torch import Tensor

from museum.plain.tensor_parallel import Weight

SETTINGS = {"pp": 2}


def overwrite(parameter: Tensor) -> None:
    assert isinstance(parameter, Weight)
    assert parameter.grad is not None
    parameter.main_grad = parameter.grad.to(parameter.main_grad.dtype)
    parameter.grad = None


PATCHES = {"accumulate": overwrite}

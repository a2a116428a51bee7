"""Updates of AdamW and SGD: their tensors and hyperparameters."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megalite_kernels.moments import Quantized

Moment = Tensor | Quantized


class Flat(NamedTuple):
    """Tensors of an update, [elements] each. Gradients are only read.

    Attributes:
        master: master weights; int16 for remainders; None if the parameters are their own masters.
        first: index of the first element among all elements that share one random seed, a multiple of 8.
    """

    parameters: Tensor
    gradients: Tensor
    master: Tensor | None = None
    first: int = 0

    def part(self, start: int, stop: int) -> Flat:
        master = None if self.master is None else self.master[start:stop]
        return Flat(self.parameters[start:stop], self.gradients[start:stop], master, self.first + start)


class AdamW(NamedTuple):
    """Hyperparameters of an update.

    Attributes:
        step: number of the update, from 1.
        factor: factor of the gradients.
        seed: an even 63-bit number for the stochastic rounding of 8-bit moments, different for each update. The second
            moment uses seed + 1.
    """

    rate: float
    decay: float
    beta1: float
    beta2: float
    epsilon: float
    step: int
    factor: float = 1.0
    seed: int = 0


class SGD(NamedTuple):
    """Hyperparameters of an update; `factor` and `seed` as in `AdamW`."""

    rate: float
    decay: float
    momentum: float
    factor: float = 1.0
    seed: int = 0

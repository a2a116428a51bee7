"""Deep Gradient Compression (arXiv:1712.01887): sparse gradients, with momentum that is corrected for delays."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.extras.synchronization.packer import Packer, Packing
from megalite.optim.layout import BucketLayout


def ratio_at(updates: int, warmup: int, ratio: float) -> float:
    """Return the share of elements that a step sends: it falls exponentially from 1 to `ratio` over the warm-up."""
    return ratio ** min(1.0, (updates + 1) / (warmup + 1))


class VelocityPacker(Packer):
    """Packer of sums of a rank's own momentum, its velocity, where they are largest.

    What is sent is forgotten, of the sum and of the velocity. So the optimizer that gets the sums has no momentum.
    """

    def __init__(self, momentum: float, packing: Packing, layout: BucketLayout, begin: int, end: int) -> None:
        """Allocate the velocity. `momentum`: its factor. The other arguments are those of `Packer`."""
        super().__init__(packing, layout, begin, end)
        self._momentum = momentum
        self.state["velocity"] = torch.zeros_like(self.state["residual"])

    def _correct(self, values: Tensor) -> None:
        super()._correct(values)
        values.add_(self.state["velocity"].view(values.shape), alpha=self._momentum * self._loss_scale)

    def _keep(self, corrected: Tensor, left_out: Tensor) -> None:
        velocity, residual = (self.state[name].view(corrected.shape) for name in ("velocity", "residual"))
        torch.div(corrected, self._loss_scale, out=velocity)
        velocity.sub_(residual).masked_fill_(corrected != left_out, 0.0)
        super()._keep(corrected, left_out)

"""Deep Gradient Compression (arXiv:1712.01887): sparse gradients with momentum that is corrected for what is delayed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.synchronization.compressed import RESIDUAL, CompressedReduction

VELOCITY = "velocity"
"""Name of the momentum of this rank's own gradients."""


def ratio_at(updates: int, warmup: int, ratio: float) -> float:
    """Return the share of elements that a step sends: it falls exponentially from 1 to `ratio` over the warm-up."""
    return ratio ** min(1.0, (updates + 1) / (warmup + 1))


class DeepGradientReduction(CompressedReduction):
    """Sum of what each rank's momentum has accumulated, where it is largest.

    A rank sums its velocity, and sends the largest elements of this sum; of those it forgets both. So the optimizer
    that gets the sums has no momentum.
    """

    def __init__(self, momentum: float, *arguments: Any, **options: Any) -> None:
        """Allocate the velocity. `momentum`: its factor. The other arguments are those of `CompressedReduction`."""
        super().__init__(*arguments, **options)
        self._momentum = momentum
        if RESIDUAL in self.residuals:
            self.residuals[VELOCITY] = torch.zeros_like(self.residuals[RESIDUAL])

    def _correct(self, name: str, rows: Tensor) -> None:
        super()._correct(name, rows)
        if name == RESIDUAL:
            rows.add_(self.residuals[VELOCITY].view(rows.shape), alpha=self._momentum * self._loss_scale)

    def _keep(self, name: str, corrected: Tensor, restored: Tensor) -> None:
        if name == RESIDUAL:
            velocity = self.residuals[VELOCITY].view(corrected.shape)
            torch.div(corrected, self._loss_scale, out=velocity)
            velocity.sub_(self.residuals[RESIDUAL].view(corrected.shape)).masked_fill_(restored != 0.0, 0.0)
        super()._keep(name, corrected, restored)

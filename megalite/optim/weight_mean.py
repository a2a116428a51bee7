"""Mean of the weights over the updates of a run (--ema-decay): mean = decay * mean + (1 - decay) * weight.

It begins with the initial weights, takes the masters after each update, and lies where they do, in fp32 or wider.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.optim.packed import chunks
from megalite_kernels.master_weights import wide_weights

EMA = "ema"
"""Name of the mean among the state of a weight. A checkpoint may lack it, or have it for a run that keeps none."""


@torch.no_grad()
def advance_(mean: Tensor, parameters: Tensor, master: Tensor | None, decay: float) -> None:
    """Add weights to their mean. `master`: master weights of any kind; None: the parameters are their own.

    Product and sum are separate operations: a fused one rounds otherwise at the ends of a tensor, and the bits would
    depend on the slices that ranks have.
    """
    for part in chunks(len(mean), mean.device):
        weights = wide_weights(parameters[part], None if master is None else master[part])
        mean[part].mul_(decay).add_(weights * (1.0 - decay))

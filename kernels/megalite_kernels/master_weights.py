"""bf16 parameters with fp32 master weights, which can be stored as 16-bit remainders of the rounding.

A parameter is its master rounded to nearest, ties away from zero. The fp32 bits of a master are therefore the bits of
its parameter, shifted left by 16, plus a remainder from -2^15 to 2^15 - 1. Parameter and int16 remainder together
restore the master exactly. (Ties to even would need one more value than 16 bits have.) A NaN stays a NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAN = 0x7FC00000  # fp32 bits of a NaN that is still a NaN after rounding


def joined(parameters: Tensor, remainders: Tensor) -> Tensor:
    """Return the fp32 masters of bf16 parameters and their int16 remainders."""
    return parameters.view(torch.int16).int().bitwise_left_shift_(16).add_(remainders).view(torch.float32)


def split_(masters: Tensor, parameters: Tensor, remainders: Tensor | None) -> None:
    """Round fp32 masters into bf16 parameters, and store the remainders if a tensor for them is given."""
    bits = masters.view(torch.int32).masked_fill(masters.isnan(), NAN)
    upper = bits.add(1 << 15).bitwise_right_shift_(16)
    parameters.view(torch.int16).copy_(upper)
    if remainders is not None:
        remainders.copy_(bits.sub_(upper.bitwise_left_shift_(16)))


def wide_weights(parameters: Tensor, master: Tensor | None) -> Tensor:
    """Return the master weights in fp32 or wider: the stored tensor itself if it is that wide, otherwise a copy."""
    if master is not None and master.dtype == torch.int16:
        return joined(parameters, master)
    weights = parameters if master is None else master
    return weights.to(torch.promote_types(weights.dtype, torch.float32))


def keep_weights_(weights: Tensor, parameters: Tensor, master: Tensor | None) -> None:
    """Store updated weights from `wide_weights` into the parameters and masters."""
    if master is None:
        parameters.copy_(weights)  # a no-op if `weights` is `parameters`
    elif master.dtype == torch.int16:
        split_(weights, parameters, master)
    else:
        master.copy_(weights)
        if _rounds_bits(parameters, master):
            split_(weights, parameters, None)
        else:
            parameters.copy_(master)


def bits_of(parameters: Tensor, master: Tensor) -> Tensor:
    """Return the parameters as kernels take them: bf16 as int16 if they are rounded as described above."""
    return parameters.view(torch.int16) if _rounds_bits(parameters, master) else parameters


def _rounds_bits(parameters: Tensor, master: Tensor) -> bool:
    return parameters.dtype == torch.bfloat16 and master.dtype in (torch.float32, torch.int16)

"""bf16 parameters and their fp32 master weights: how they are rounded, and masters kept as what the rounding took off.

A parameter is its master rounded to nearest, halves away from zero. So the fp32 bits of a master are those of its
parameter, put in front of 16 zeros, plus a remainder between -2^15 and 2^15 - 1: an int16 beside the parameter keeps
the master to the bit. (Rounding halves to even leaves one number too many for 16 bits.) A NaN is kept as one.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAN = 0x7FC00000  # the bits of one that rounding leaves one


def joined(parameters: Tensor, remainders: Tensor) -> Tensor:
    """The fp32 masters of bf16 parameters and int16 remainders."""
    return parameters.view(torch.int16).int().bitwise_left_shift_(16).add_(remainders).view(torch.float32)


def split_(masters: Tensor, parameters: Tensor, remainders: Tensor | None) -> None:
    """Round fp32 masters into bf16 parameters, and keep the remainders where there is a place for them."""
    bits = masters.view(torch.int32).masked_fill(masters.isnan(), NAN)
    upper = bits.add(1 << 15).bitwise_right_shift_(16)
    parameters.view(torch.int16).copy_(upper)
    if remainders is not None:
        remainders.copy_(bits.sub_(upper.bitwise_left_shift_(16)))


def wide_weights(parameters: Tensor, master: Tensor | None) -> Tensor:
    """The master weights in fp32 or wider: memory of their own, or themselves where they are as wide."""
    if master is not None and master.dtype == torch.int16:
        return joined(parameters, master)
    weights = parameters if master is None else master
    return weights.to(torch.promote_types(weights.dtype, torch.float32))


def keep_weights_(weights: Tensor, parameters: Tensor, master: Tensor | None) -> None:
    """Round what `wide_weights` gave into what is kept."""
    if master is None:
        parameters.copy_(weights)  # nothing to do where they are themselves
    elif master.dtype == torch.int16:
        split_(weights, parameters, master)
    else:
        master.copy_(weights)
        if _rounds_bits(parameters, master):
            split_(weights, parameters, None)
        else:
            parameters.copy_(master)


def bits_of(parameters: Tensor, master: Tensor) -> Tensor:
    """The parameters as the kernels take them: bf16 ones as 16-bit integers where they are rounded as above."""
    return parameters.view(torch.int16) if _rounds_bits(parameters, master) else parameters


def _rounds_bits(parameters: Tensor, master: Tensor) -> bool:
    return parameters.dtype == torch.bfloat16 and master.dtype in (torch.float32, torch.int16)

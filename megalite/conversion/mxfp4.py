"""Weights of experts in blocks of MXFP4 (the Open Compute Project's microscaling formats), as gpt-oss is published.

A weight [experts, inputs, outputs] is stored as two tensors of bytes: NAME_blocks [experts, outputs, inputs / 32, 16],
of which each byte has two numbers of 4 bits, the lower one first, and NAME_scales [experts, outputs, inputs / 32], of
which each byte is the exponent of 32 numbers, plus 127. All products are exact in bf16, except beyond its range.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megalite.checkpoint.tensors import Kind
from megalite.conversion.mapping import LastTensor, Stored
from megalite.errors import CheckpointError

BLOCKS, SCALES = "_blocks", "_scales"
_BYTES, _BIAS = 16, 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpacked(stored: Stored) -> Stored:
    """Return the tensors with each pair of blocks and scales replaced by the weight in bf16, which is made when read.

    Raises CheckpointError if a pair is incomplete, or its shapes do not fit together.
    """
    found, last = dict(stored), LastTensor()
    for name in [name for name in stored if name.endswith(BLOCKS)]:
        weight = name.removesuffix(BLOCKS)
        blocks, read_blocks = found.pop(name)
        scales, read_scales = found.pop(weight + SCALES, (None, None))
        if scales is None or read_scales is None:
            raise CheckpointError(f"{name} has no {weight + SCALES} beside it")
        fits = len(blocks.shape) == 4 and blocks.shape[-1] == _BYTES and blocks.shape[:-1] == scales.shape
        if not fits or {blocks.dtype, scales.dtype} != {torch.uint8}:
            raise CheckpointError(
                f"{name} {list(blocks.shape)} and {weight + SCALES} {list(scales.shape)} are not blocks of MXFP4"
            )
        if weight in found:
            raise CheckpointError(f"{weight} is there twice: as it is, and in blocks of MXFP4")
        experts, outputs, count, _ = blocks.shape
        make = partial(_unpack, read_blocks, read_scales)
        kind = Kind((experts, 2 * _BYTES * count, outputs), torch.bfloat16)
        found[weight] = kind, partial(last.get, weight, make)
    return found


def _unpack(read_blocks: Callable[[], Tensor], read_scales: Callable[[], Tensor]) -> Tensor:
    """Return a weight [experts, inputs, outputs], computed for one expert after the other."""
    blocks, exponents = read_blocks(), read_scales().int() - _BIAS
    experts, outputs, count, _ = blocks.shape
    numbers = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)], dtype=torch.bfloat16)
    weight = torch.empty(experts, outputs, 2 * _BYTES * count, dtype=torch.bfloat16)
    for expert, own in enumerate(blocks):
        pairs = torch.stack([own & 15, own >> 4], dim=-1).flatten(-2)
        values = torch.ldexp(numbers[pairs.int()], exponents[expert].unsqueeze(-1))
        weight[expert] = values.flatten(-2)
    return weight.transpose(1, 2)

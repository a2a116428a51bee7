"""Initial weights as a pure function of (seed, global name, index), the same for every layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from megalite.parallel.parameter import Parameter, named_pieces
from megalite.parallel.sharding import Box, Constant, LogicalTensor

BLOCK_ELEMENTS = 1 << 16


def initialize(module: nn.Module, seed: int) -> None:
    """Give every parameter of `module` its initial values."""
    for parameter in {id(parameter): parameter for parameter, _ in named_pieces(module)}.values():
        set_initial_values(parameter, seed)


@torch.no_grad()
def set_initial_values(parameter: Parameter, seed: int) -> None:
    """Fill one parameter; padding becomes zero."""
    parameter.allocate()
    parameter.zero_()
    for piece in parameter.sharding.pieces:
        if piece.box.numel:
            piece.view(parameter).copy_(initial_values(piece.tensor, piece.box, seed))


def initial_values(tensor: LogicalTensor, box: Box, seed: int) -> Tensor:
    """The initial values of `box`, in fp32 on the CPU.

    The whole logical tensor, as a matrix of rows of its last dimension, is drawn in blocks of rows, each seeded by
    (seed, name, block); only the blocks that meet the box are drawn.
    """
    if isinstance(tensor.initial, Constant):
        return torch.full(box.size, tensor.initial.value)
    total_rows = math.prod(tensor.shape[:-1])
    inside = torch.arange(total_rows).view(tensor.shape[:-1])[box.slices()[:-1]].flatten()
    block_rows = max(1, BLOCK_ELEMENTS // tensor.shape[-1])
    values = torch.empty(inside.numel(), box.size[-1])
    blocks = inside // block_rows
    for block in blocks.unique().tolist():
        chosen = blocks == block
        rows = min(block_rows, total_rows - block * block_rows)
        drawn = tensor.initial.std * _standard_normal(tensor, block, rows, seed)
        values[chosen] = drawn[inside[chosen] - block * block_rows, box.slices()[-1]]
    return values.view(box.size)


def _standard_normal(tensor: LogicalTensor, block: int, rows: int, seed: int) -> Tensor:
    key = hashlib.blake2b(f"{seed}/{tensor.name}/{block}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    return torch.randn(rows, tensor.shape[-1], generator=generator)

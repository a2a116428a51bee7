"""Initial weights as a pure function of (seed, global name, index). They are equal under every layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from megalite.errors import MegaliteError
from megalite.parallel.parameter import Parameter, named_pieces
from megalite.parallel.sharding import AsBuilt, Box, Constant, Drawn, LogicalTensor

BLOCK_ELEMENTS = 1 << 16


def initialize(module: nn.Module, seed: int) -> None:
    """Set the initial values of every parameter of `module`."""
    for parameter in {id(parameter): parameter for parameter, _ in named_pieces(module)}.values():
        set_initial_values(parameter, seed)


@torch.no_grad()
def set_initial_values(parameter: Parameter, seed: int) -> None:
    """Set the initial values of one parameter. Padding is zero."""
    parameter.allocate()
    parameter.zero_()
    for piece in parameter.sharding.pieces:
        if piece.box.numel:
            piece.view(parameter).copy_(initial_values(piece.tensor, piece.box, seed))


def initial_values(tensor: LogicalTensor, box: Box, seed: int) -> Tensor:
    """Return the initial values of `box`, in fp32 on the CPU.

    The logical tensor, as a matrix whose columns are its last dimension, is divided into blocks of rows. Each block has
    its own seed, made of (seed, name, block). Only the blocks that overlap the box are drawn.
    Values that a function draws are drawn whole.
    """
    if isinstance(tensor.initial, AsBuilt):
        raise TypeError(f"{tensor.name} has the values of its module, which no seed gives")
    if isinstance(tensor.initial, Drawn):
        return _drawn_whole(tensor, tensor.initial, seed)[box.slices()]
    if isinstance(tensor.initial, Constant):
        return torch.full(box.size, tensor.initial.value)
    total_rows = math.prod(tensor.shape[:-1])
    inside = torch.arange(total_rows).view(tensor.shape[:-1])[box.slices()[:-1]].flatten()
    block_rows = max(1, BLOCK_ELEMENTS // tensor.shape[-1])
    values = torch.empty(inside.numel(), box.size[-1])
    blocks, counts = torch.unique_consecutive(inside // block_rows, return_counts=True)  # the rows are in order
    ends = counts.cumsum(0)
    for block, begin, end in zip(blocks.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
        part, rows = slice(begin, end), min(block_rows, total_rows - block * block_rows)
        drawn = tensor.initial.std * _standard_normal(tensor, block, rows, seed)
        values[part] = drawn[inside[part] - block * block_rows, box.slices()[-1]]
    return values.view(box.size)


def _standard_normal(tensor: LogicalTensor, block: int, rows: int, seed: int) -> Tensor:
    return torch.randn(rows, tensor.shape[-1], generator=_generator(f"{seed}/{tensor.name}/{block}"))


def _drawn_whole(tensor: LogicalTensor, initial: Drawn, seed: int) -> Tensor:
    """Return the values that a function draws with a generator of its own, seeded by (seed, name).

    Raises MegaliteError if they do not have the number of elements of the tensor.
    """
    values = initial.draw(_generator(f"{seed}/{tensor.name}"))
    if not isinstance(values, Tensor) or values.numel() != math.prod(tensor.shape):
        shown = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise MegaliteError(f"initial values for {tensor.name} are {shown}, and it has the shape {tensor.shape}")
    return values.detach().float().cpu().reshape(tensor.shape)


def _generator(key: str) -> torch.Generator:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

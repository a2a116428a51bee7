"""Communication of activations between replicated and split regions of a layer, with gradients.

Each function runs one operation in forward and its transpose in backward (Megatron-LM, arXiv:1909.08053; sequence
parallelism, arXiv:2205.05198). The pairs are: copy and reduce; gather and scatter along the last dimension; all-gather
and reduce-scatter along the sequence (dimension 0). All are out of place: inputs and incoming gradients are never
overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.mesh import Group

Map = Callable[[Tensor, Group], Tensor]


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, group: Group, forward: Map, transpose: Map) -> Tensor:
        ctx.group, ctx.transpose = group, transpose
        return forward(input, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transpose(gradients[0], ctx.group), None, None, None


def _identity(tensor: Tensor, group: Group) -> Tensor:
    return tensor.view_as(tensor)


def _sum(tensor: Tensor, group: Group) -> Tensor:
    return collectives.all_reduce_(tensor.clone(memory_format=torch.contiguous_format), group)


def _slice_last(tensor: Tensor, group: Group) -> Tensor:
    return tensor.chunk(group.size, dim=-1)[group.rank].contiguous()


def _concatenate_last(tensor: Tensor, group: Group) -> Tensor:
    gathered = collectives.all_gather(tensor, group)
    return torch.cat(gathered.chunk(group.size, dim=0), dim=-1)


def _apply(input: Tensor, group: Group, forward: Map, transpose: Map) -> Tensor:
    if group.size == 1:
        return input
    return _Region.apply(input, group, forward, transpose)


def copy_to_region(input: Tensor, group: Group) -> Tensor:
    """Return the input unchanged; backward sums the gradients over the ranks."""
    return _apply(input, group, _identity, _sum)


def reduce_from_region(input: Tensor, group: Group) -> Tensor:
    """Sum the partial results over the ranks; backward returns the gradient unchanged."""
    return _apply(input, group, _sum, _identity)


def gather_from_region(input: Tensor, group: Group) -> Tensor:
    """Gather [..., n] of each rank into [..., size * n]; backward takes this rank's slice."""
    return _apply(input, group, _concatenate_last, _slice_last)


def scatter_to_region(input: Tensor, group: Group) -> Tensor:
    """Return this rank's slice of the last dimension; backward gathers."""
    return _apply(input, group, _slice_last, _concatenate_last)


def all_gather_sequence(input: Tensor, group: Group) -> Tensor:
    """Gather [sequence / size, ...] into [sequence, ...]; backward reduce-scatters."""
    return _apply(input, group, collectives.all_gather, collectives.reduce_scatter)


def reduce_scatter_sequence(input: Tensor, group: Group) -> Tensor:
    """Reduce partial sums [sequence, ...] to this rank's [sequence / size, ...]; backward all-gathers."""
    return _apply(input, group, collectives.reduce_scatter, collectives.all_gather)

"""Tensor parallelism: weights of which a rank has a part, and the layers that have them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from museum.plain.ranks import Group, Ranks, all_gather, all_sum, both
from museum.plain.settings import Settings


def gather_sequence(hidden: Tensor, group: Group) -> Tensor:
    """Return the tokens of all tensor-parallel ranks."""
    return torch.cat(all_gather(hidden, group), 1)


def scatter_sequence(partial: Tensor, group: Group) -> Tensor:
    """Return this rank's tokens of the sum over tensor-parallel ranks."""
    return all_sum(partial, group).chunk(group.size, 1)[group.index].contiguous()


def column_input_gradient(partial: Tensor, group: Group) -> Tensor:
    """Return the gradient of a column-parallel layer's input, from that through this rank's columns."""
    return all_sum(partial, group)


def row_parallel_output(partial: Tensor, group: Group) -> Tensor:
    """Return the output of a row-parallel layer, from this rank's term."""
    return all_sum(partial, group)


def enter_tensor_parallel(hidden: Tensor, ranks: Ranks) -> Tensor:
    """Return the tokens that a column-parallel layer takes, all of them."""
    group = ranks.tp
    if ranks.settings.sp:
        return both(hidden, lambda x: gather_sequence(x, group), lambda x: scatter_sequence(x, group))
    return both(hidden, lambda x: x, lambda x: column_input_gradient(x, group))


def leave_tensor_parallel(partial: Tensor, ranks: Ranks) -> Tensor:
    """Return the sum of the terms of all ranks; with sequence parallelism, for this rank's tokens."""
    group = ranks.tp
    if ranks.settings.sp:
        return both(partial, lambda x: scatter_sequence(x, group), lambda x: gather_sequence(x, group))
    return both(partial, lambda x: row_parallel_output(x, group), lambda x: x)


@dataclass(frozen=True)
class Part:
    """Part of a whole weight that a rank has: a range of one dimension, or all.

    Attributes:
        shape: that of the whole weight.
        range: (dimension, start, size); None for all of it.
        is_expert: whether it is of an expert.
        shares_heads: whether several tensor-parallel ranks have the same key-value head.
    """

    shape: tuple[int, ...]
    range: tuple[int, int, int] | None = None
    is_expert: bool = False
    shares_heads: bool = False

    @property
    def own_shape(self) -> tuple[int, ...]:
        sizes = list(self.shape)
        if self.range is not None:
            sizes[self.range[0]] = self.range[2]
        return tuple(sizes)


class Weight(nn.Parameter):
    """Weight of this rank, with its part of the whole one, and its gradient summed over micro-batches."""

    part: Part
    main_grad: Tensor


def weight(part: Part, settings: Settings) -> Weight:
    """Return a weight, whose values come later."""
    found = Weight(torch.empty(part.own_shape, dtype=settings.weight_dtype))
    found.part = part
    found.main_grad = torch.zeros(part.own_shape, dtype=settings.wide)
    found.register_post_accumulate_grad_hook(accumulate)
    return found


def accumulate(parameter: Tensor) -> None:
    """Add the gradient of a micro-batch to the sum."""
    assert isinstance(parameter, Weight)
    assert parameter.grad is not None
    parameter.main_grad += parameter.grad
    parameter.grad = None


def block(length: int, group: Group) -> tuple[int, int]:
    """Return start and size of this rank's block of so many elements."""
    return length // group.size * group.index, length // group.size


class Linear(nn.Module):
    """Product with a weight, or with this rank's part of it, and no communication."""

    def __init__(self, part: Part, ranks: Ranks) -> None:
        super().__init__()
        self.weight, self.ranks = weight(part, ranks.settings), ranks

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


class ColumnLinear(Linear):
    """Linear layer of which a rank has some output features."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(enter_tensor_parallel(hidden, self.ranks), self.weight)


class RowLinear(Linear):
    """Linear layer of which a rank has some input features."""

    def forward(self, hidden: Tensor) -> Tensor:
        return leave_tensor_parallel(F.linear(hidden, self.weight), self.ranks)


class Embedding(nn.Module):
    """Word embedding of which a rank has some tokens."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, settings = ranks, ranks.settings
        rows = block(settings.vocabulary, ranks.tp)
        self.weight = weight(Part((settings.vocabulary, settings.hidden), (0, *rows)), settings)

    def forward(self, tokens: Tensor) -> Tensor:
        return leave_tensor_parallel(vocab_parallel_embedding(tokens, self.weight, self.ranks.tp), self.ranks)


def vocab_parallel_embedding(tokens: Tensor, weight: Tensor, group: Group) -> Tensor:
    """Return the embeddings [b, s, h] of tokens in this rank's part of the vocabulary, and zeros for the others."""
    local = tokens - len(weight) * group.index
    inside = (local >= 0) & (local < len(weight))
    return F.embedding(local * inside, weight) * inside[..., None]


def vocab_parallel_loss(logits: Tensor, labels: Tensor, group: Group) -> Tensor:
    """Return the cross-entropy [b, s] of each token, from logits [b, s, this rank's part of the vocabulary]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits - all_sum(logits.detach().amax(-1), group, dist.ReduceOp.MAX)[..., None]
    total = both(logits.exp().sum(-1), lambda x: all_sum(x, group), lambda x: x)
    local = labels - logits.shape[-1] * group.index
    inside = (local >= 0) & (local < logits.shape[-1])
    own = logits.gather(-1, (local * inside)[..., None]).squeeze(-1) * inside
    return total.log() - both(own, lambda x: all_sum(x, group), lambda x: x)

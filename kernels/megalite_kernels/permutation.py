"""Permutation of tokens' rows into groups, one per expert or per rank, and the sum of a token's rows on the way back.

A token has several places, at most one in each group. The permuted rows are sorted by group, and within a group by
token. `permute` copies each token's row to its places; `unpermute` adds the rows at a token's places, in the order of
its places. Each is the gradient of the other, and neither uses atomic operations, so the bits are always the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite_kernels.implementation import current
from megalite_kernels.products import changed, rounded


class Permutation(NamedTuple):
    """Places of the rows of tokens among the permuted rows."""

    tokens: Tensor
    """[rows]: the token of each permuted row; -1 for a row of padding."""
    places: Tensor
    """[tokens, choices]: the permuted row of each choice of a token; -1 if the choice has none."""
    ends: Tensor
    """[groups], int32: the end of each group's rows, including its padding."""
    choices: Tensor
    """[rows]: the choice of each permuted row, counted over all tokens; -1 for a row of padding."""

    @property
    def of_choices(self) -> Permutation:
        """The permutation of the choices, [tokens * choices], each of which has at most one place."""
        return Permutation(self.choices, self.places.view(-1, 1), self.ends, self.choices)

    def first(self, rows: int) -> Permutation:
        """Return the permutation without what is behind the first rows, which no token has as its place."""
        return self._replace(tokens=self.tokens[:rows], choices=self.choices[:rows])


def group_rows(groups: Tensor, count: int, rows: int | None = None, capacity: int | None = None) -> Permutation:
    """Sort the choices of tokens by group.

    Args:
        groups: [tokens, choices]; -1 for a choice that gets no row. A token's choices are of different groups.
        count: number of groups.
        rows: number of choices that get a row, or more, of which `Permutation.first` takes these. Without it, the
            device is asked, which waits for it.
        capacity: pads each group with empty rows to this many, at least as many as it has. The number of rows is then
            known without asking the device.
    """
    tokens, choices = groups.shape
    keys, order = groups.flatten().remainder(count + 1).sort(stable=True)  # -1 becomes the last key
    begins = torch.searchsorted(keys, torch.arange(count + 1, device=keys.device))
    ranks = torch.arange(tokens * choices, device=keys.device)
    if capacity is None:
        rows = int(begins[-1]) if rows is None else rows
        ends = begins[1:]
        source = order[:rows]
    else:
        rows = count * capacity
        ends = torch.arange(1, count + 1, device=keys.device) * capacity
        ranks = ranks + (keys * capacity - begins[keys])
        source = torch.full((rows + tokens * choices,), -1, device=keys.device)
        # Choices without a row are written behind the rows, each to an element of its own.
        behind = rows + torch.arange(tokens * choices, device=keys.device)
        source = source.index_copy_(0, torch.where(keys < count, ranks, behind), order)[:rows]
    places = torch.empty_like(ranks).index_copy_(0, order, torch.where(keys < count, ranks, -1))
    return Permutation(source // choices, places.view(tokens, choices), ends.int(), source)


def occurrences(numbers: Tensor, count: int) -> Tensor:
    """Count how often each number below `count` occurs: [..., choices] to [..., count]. -1 does not count."""
    targets = numbers.remainder(count + 1)  # -1 becomes the last one
    found = torch.zeros(*numbers.shape[:-1], count + 1, dtype=torch.int64, device=numbers.device)
    return found.scatter_add_(-1, targets, torch.ones_like(targets))[..., :count]


# ------------------------------------------------------------------------------------------------- the references


def _copied(input: Tensor, tokens: Tensor) -> Tensor:
    if not len(input):
        return input.new_zeros(len(tokens), input.shape[1])
    absent = tokens < 0
    copied = input.index_select(0, tokens.clamp(min=0))
    if absent.device.type == "cpu" and not absent.any():  # most have no padding; on a GPU, asking would wait
        return copied
    return torch.where(absent[:, None], 0.0, copied)


def _added(rows: Tensor, places: Tensor) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(len(places), rows.shape[1], dtype=wide, device=rows.device)
    for place in places.unbind(1):
        total = changed(total, "add", _copied(rows, place))
    return rounded(total, rows.dtype)


class _Copy(torch.autograd.Function):
    """Rows of an input [tokens, width] at their places, or with `adds` the sum of the rows at each token's places."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, tokens: Tensor, places: Tensor, adds: bool) -> Tensor:
        ctx.save_for_backward(tokens, places)
        ctx.adds = adds
        copied, added = _copied, _added
        if current().runs_triton("permutation", input):
            from megalite_kernels.permutation_kernels import launch_add as added
            from megalite_kernels.permutation_kernels import launch_copy as copied
        return added(input, places) if adds else copied(input, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Copy.apply(gradients[0], *ctx.saved_tensors, not ctx.adds), None, None, None


# ------------------------------------------------------------------------------------------------- public functions


def permute(input: Tensor, permutation: Permutation) -> Tensor:
    """Copy the rows of tokens to their places: [tokens, width] to [rows, width]. Rows of padding are zero."""
    output: Tensor = _Copy.apply(input, permutation.tokens, permutation.places, False)
    return output


def unpermute(rows: Tensor, permutation: Permutation) -> Tensor:
    """Add the rows at each token's places, in fp32 or wider: [rows, width] to [tokens, width]."""
    output: Tensor = _Copy.apply(rows, permutation.tokens, permutation.places, True)
    return output

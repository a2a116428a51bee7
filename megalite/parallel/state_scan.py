"""Recurrent layers under context parallelism: states and the tokens before a cut, from the ranks that have them.

A run of consecutive tokens maps the state that enters it to the one that leaves it, and this map is affine. Ranks
gather the maps of all runs, whose size does not depend on the number of tokens, and compose them in the order of the
sample: so a sample may be cut in any way (`parallel/sequence.py`). Backward gathers the adjoint maps, and goes from the
end.

A causal convolution needs the last tokens before each run. Every rank gathers the ends of all runs.

No rank sends more or less than another, whatever the documents are, and each forward and each backward is one gather
or one reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from megalite.parallel.sequence import SequenceLayout
from megalite.parallel.stage_module import Inside
from megalite_kernels.recurrence import advance, retreat

INSIDE = (Inside("ends of runs for a convolution", "cp"), Inside("maps of states", "cp"))
"""Collectives of a recurrent layer, in the order of forward."""
Map = tuple[Tensor, Tensor]
"""Matrix and offset of an affine map of a state."""


@dataclass(frozen=True)
class StateScan:
    """States of the runs of tokens that context-parallel ranks have.

    Attributes:
        group: the context-parallel ranks.
        layout: the runs of each of them.
    """

    group: Group
    layout: SequenceLayout

    def entering(self, maps: Sequence[Map]) -> list[Tensor]:
        """Return the state that enters each run of this rank. `maps`: those of its runs, from entering to leaving."""
        state = torch.zeros_like(maps[0][1])
        found = []
        for matrix, offset in self._gather(maps):
            found.append(state)
            state = advance(matrix, offset, state)
        return self._own(found)

    def leaving(self, maps: Sequence[Map]) -> list[Tensor]:
        """Return the gradient of the state that leaves each run of this rank.

        `maps`: the adjoint maps of its runs, from the gradient of the leaving state to that of the entering one.
        """
        gradient = torch.zeros_like(maps[0][1])
        found = []
        for matrix, offset in reversed(self._gather(maps)):
            found.append(gradient)
            gradient = retreat(matrix, offset, gradient)
        return self._own(found[::-1])

    def _gather(self, maps: Sequence[Map]) -> list[Map]:
        """Return the maps of all runs, in the order of the sample."""
        matrix, offset = maps[0]
        own = torch.cat([part.flatten() for each in maps for part in each]).view(len(maps), -1)
        message = "context parallelism: waited for the states of ranks %s"
        ranks = ", ".join(map(str, self.group.ranks))
        gathered = collectives.all_gather_async(own, self.group).wait(message, ranks)
        return [
            (first.view(matrix.shape), second.view(offset.shape))
            for place in _order(self.layout)
            for first, second in [gathered[place].split([matrix.numel(), offset.numel()])]
        ]

    def _own(self, of_runs: Sequence[Tensor]) -> list[Tensor]:
        return [of_runs[number] for number in self.layout.run_numbers[self.layout.rank]]


def tokens_before(input: Tensor, count: int, group: Group, layout: SequenceLayout) -> list[Tensor]:
    """Return the `count` tokens before each run of this rank, [count, batch, ...] each, with zeros before the sample.

    `input`: this rank's tokens, [tokens, batch, ...]. Every rank must call this function and run its backward.
    """
    found: tuple[Tensor, ...] = _TokensBefore.apply(input, count, group, layout)
    return list(found)


class _TokensBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, count: int, group: Group, layout: SequenceLayout) -> tuple[Tensor, ...]:
        """Gather the last tokens of all runs, at most `count` of each, and return those before this rank's runs."""
        length = len(layout.runs[0])
        kept = min(count, length)
        ctx.group, ctx.layout, ctx.kept, ctx.count, ctx.shape = group, layout, kept, count, input.shape
        ends = torch.stack([run[-kept:] for run in input.split(length)]) if kept else input[:0]
        message = "context parallelism: waited for the ends of the runs of ranks %s"
        gathered = collectives.all_gather_async(ends, group).wait(message, ", ".join(map(str, group.ranks)))
        whole = torch.cat([input.new_zeros(count, *input.shape[1:]), *(gathered[place] for place in _order(layout))])
        # Row `number * kept + count` of `whole` is the first of the run's own: the rows before it are those before it.
        return tuple(whole[number * kept : number * kept + count].clone() for number in layout.run_numbers[layout.rank])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return each gradient to the rank that has the token, where those of all ranks are added in rank order."""
        layout, kept, count, shape = ctx.layout, ctx.kept, ctx.count, ctx.shape
        numbers = layout.run_numbers
        runs = sum(map(len, numbers))
        whole = gradients[0].new_zeros(count + runs * kept, *shape[1:])
        for number, gradient in zip(numbers[layout.rank], gradients, strict=True):
            whole[number * kept : number * kept + count] += gradient
        of_runs = whole[count:].unflatten(0, (runs, kept))
        by_rank = torch.stack([of_runs[list(those)] for those in numbers])
        own = collectives.reduce_scatter_async(by_rank, ctx.group).wait(
            "context parallelism: waited for gradients of the ends of runs from ranks %s",
            ", ".join(map(str, ctx.group.ranks)),
        )[0]
        input_gradient = gradients[0].new_zeros(shape)
        for run, end in zip(input_gradient.split(len(layout.runs[0])), own, strict=True):
            run[-kept:] = end
        return input_gradient, None, None, None


def _order(layout: SequenceLayout) -> list[int]:
    """Return where each run of the sample, in its order, is among those that were gathered from all ranks."""
    by_rank = [number for numbers in layout.run_numbers for number in numbers]
    return sorted(range(len(by_rank)), key=by_rank.__getitem__)

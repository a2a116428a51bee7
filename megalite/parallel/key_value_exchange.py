"""Exchange of keys and values between context-parallel ranks, and of their gradients back.

`Ring` passes blocks on from rank to rank, while attention to the current block runs (arXiv:2310.01889). In round i, a
rank has the block of the rank i places before it. In backward, a block's gradient follows it: each rank adds its
contribution, the owner comes last. `Gather` gathers all blocks in one round, in the order of the sample, and keeps them
for backward, which reduces the gradients in rank order.

All ranks communicate equally often, whether or not they need what arrives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.collectives import Pending
from megalite.parallel.mesh import Group
from megalite.parallel.sequence import SequenceLayout
from megalite.parallel.stage_module import Inside


class GradientSum(Protocol):
    """Sum of the gradients of this rank's keys and values over the ranks that have used them."""

    def add(self, gradient: Tensor) -> None:
        """Add the gradient of the block of the next round, in fp32 or wider."""

    def total(self) -> Tensor:
        """Return the gradient of this rank's own block, after the last round."""


class KeyValueExchange(Protocol):
    """Way in which a rank gets the keys and values of others. Blocks are [2, batch, groups, tokens, width]."""

    @staticmethod
    def inside(group: Group) -> list[Inside]:
        """Return the collectives of forward."""

    def prepare(self, own: Tensor) -> Tensor:
        """Return the tensor that backward keeps and `blocks` starts from, given this rank's own block."""

    def blocks(self, prepared: Tensor) -> Iterator[Tensor]:
        """Yield the block of each round."""

    def gradient_sum(self) -> GradientSum:
        """Return an empty sum, for one backward."""


@dataclass(frozen=True)
class Ring:
    """Ring of ranks."""

    group: Group

    @staticmethod
    def inside(group: Group) -> list[Inside]:
        # In backward, keys and values are passed on again, and their gradients after them.
        return [Inside(f"keys and values of round {number}", "cp", 2) for number in range(2, group.size + 1)]

    def prepare(self, own: Tensor) -> Tensor:
        return own

    def blocks(self, prepared: Tensor) -> Iterator[Tensor]:
        block, size = prepared, self.group.size
        for number in range(1, size + 1):
            arriving = self.pass_on(block) if number < size else None
            yield block
            if arriving is not None:
                block = self.wait(arriving, number + 1, "keys and values").view(block.shape)

    def gradient_sum(self) -> GradientSum:
        return _RingSum(self)

    def pass_on(self, block: Tensor) -> Pending:
        """Begin to send a tensor to the next rank, and to receive that of the rank before as [elements]."""
        size, rank = self.group.size, self.group.rank
        sent, received = [0] * size, [0] * size
        sent[(rank + 1) % size] = received[(rank - 1) % size] = block.numel()
        return collectives.all_to_all_rows_async(block.reshape(-1), sent, received, self.group)

    def wait(self, arriving: Pending, number: int, what: str) -> Tensor:
        """Wait for what the rank before has passed on for round `number`."""
        before = self.group.ranks[(self.group.rank - 1) % self.group.size]
        message = "context parallelism, round %d of %d: waited for %s from rank %d"
        return arriving.wait(message, number, self.group.size, what, before)


class _RingSum:
    def __init__(self, ring: Ring) -> None:
        self.ring, self.round = ring, 0
        self.own: Tensor | None = None
        self.arriving: Pending | None = None

    def add(self, gradient: Tensor) -> None:
        self.round += 1
        if self.round == 1:
            self.own = gradient
            return
        if self.arriving is not None:
            gradient = self._arrived(self.round).view(gradient.shape).add_(gradient)
        self.arriving = self.ring.pass_on(gradient)

    def total(self) -> Tensor:
        assert self.own is not None
        return self.own if self.arriving is None else self._arrived(self.round + 1).view(self.own.shape).add_(self.own)

    def _arrived(self, number: int) -> Tensor:
        assert self.arriving is not None
        return self.ring.wait(self.arriving, min(number, self.ring.group.size), "gradients of keys and values")


@dataclass(frozen=True)
class Gather:
    """Gather of all ranks' blocks, in the order of the sample.

    `layout`: the tokens of each rank of the group.
    """

    group: Group
    layout: SequenceLayout

    @staticmethod
    def inside(group: Group) -> list[Inside]:
        return [Inside("gather of keys and values", "cp")]

    def prepare(self, own: Tensor) -> Tensor:
        message = "context parallelism: waited for the keys and values of ranks %s"
        ranks = ", ".join(map(str, self.group.ranks))
        gathered = collectives.all_gather_async(own[None], self.group).wait(message, ranks)
        return self.layout.in_order(gathered.unbind(0), dimension=-2)

    def blocks(self, prepared: Tensor) -> Iterator[Tensor]:
        yield prepared

    def gradient_sum(self) -> GradientSum:
        return _GatherSum(self)


class _GatherSum:
    def __init__(self, gather: Gather) -> None:
        self.gather = gather
        self.pending: Pending | None = None

    def add(self, gradient: Tensor) -> None:
        by_rank = torch.stack(self.gather.layout.by_rank(gradient, dimension=-2))
        self.pending = collectives.reduce_scatter_async(by_rank, self.gather.group)

    def total(self) -> Tensor:
        assert self.pending is not None
        message = "context parallelism: waited for gradients of keys and values from ranks %s"
        return self.pending.wait(message, ", ".join(map(str, self.gather.group.ranks)))[0]

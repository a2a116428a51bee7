"""Sums of gradients by messages between ranks, instead of the backend's collectives: around a ring, or up a tree.

A sum takes rounds. `begin` starts the first one; the others run when the result is waited for, each when the round
before has ended. All ranks of a group start the rounds of all buckets in one order, so no two of them wait for each
other, not even on NCCL, where a message waits for all earlier ones of its group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.optim.flat import owned
from megalite.optim.layout import BucketShardSpec
from megalite.optim.reduction import Reduction, ReductionGroups
from megalite.parallel import collectives
from megalite.parallel.collectives import Pending, completed, launch
from megalite.parallel.mesh import Group

Rounds = Iterator[Pending]
"""Rounds of messages. Each is started by `next`, after the one before has been waited for."""


class RingReduction(Reduction):
    """Reduce-scatter and all-gather around a ring (Patarasu and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).

    Each of n ranks sends (n - 1) / n of the bucket per direction of the sum, which is the least, in n - 1 rounds. The
    slice of rank k is added in the order of ranks k + 1, k + 2, ..., k (modulo n).
    """

    def begin(self, gradients: Tensor, out: Tensor | None) -> Pending:
        """Start to sum. The other slices of `gradients` become partial sums."""
        shards = self.groups.shards
        if shards.size == 1:
            return super().begin(gradients, out)
        rows = gradients.view(shards.size, -1)
        return _started(_reduce_scatter(rows, shards), rows[shards.rank], out)

    def begin_gather(self, shard: Tensor, gradients: Tensor) -> Pending:
        shards = self.groups.shards
        if shards.size == 1:
            return super().begin_gather(shard, gradients)
        rows = gradients.view(shards.size, -1)
        if shard.data_ptr() != rows[shards.rank].data_ptr():
            rows[shards.rank] = shard
        return _started(_all_gather(rows, shards), gradients)


class TreeReduction(Reduction):
    """Sum up a binary tree to its root, and broadcast down it; for ZeRO 0 and 1.

    Sanders, Speck and Träff (2009, doi:10.1016/j.parco.2009.09.001) describe it, and send parts of the bucket through
    two trees at once. Here are one tree and whole buckets: up to 2 log2(n) rounds, in each of which a rank sends the
    bucket to at most two others. It pays where latency counts more than bytes. Rank k adds its own gradient, the sum of
    rank 2k + 1 and that of rank 2k + 2, in this order.
    """

    def __init__(self, spec: BucketShardSpec, groups: ReductionGroups) -> None:
        super().__init__(spec, groups)
        device = spec.layout.slots[0].parameter.device
        collectives.all_reduce_(torch.zeros(1, device=device), groups.shards)  # NCCL connects all ranks at once

    def begin(self, gradients: Tensor, out: Tensor | None) -> Pending:
        """Start to sum. `gradients` become the sum."""
        shards = self.groups.shards
        if shards.size == 1:
            return super().begin(gradients, out)
        return _started(_tree(gradients, shards), owned(gradients, shards), out)

    def begin_gather(self, shard: Tensor, gradients: Tensor) -> Pending:
        """Return the sum, which has arrived. If more has been added to the slices since, the backend gathers them."""
        return completed(gradients) if self.shards_have_all else super().begin_gather(shard, gradients)


def _started(rounds: Rounds, result: Tensor, out: Tensor | None = None) -> Pending:
    """Start the first round, and run the others when the result is waited for."""
    first = next(rounds)

    def finish() -> Tensor:
        first.wait()
        for each in rounds:
            each.wait()
        return result if out is None or out.data_ptr() == result.data_ptr() else out.copy_(result)

    return Pending(None, finish)


def _reduce_scatter(rows: Tensor, group: Group) -> Rounds:
    """Sum rows [size, n] over the group, in place: row k on rank k."""
    size, rank = group.size, group.rank
    received = torch.zeros_like(rows[0])
    for number in range(size - 1):
        sent, summed = rows[(rank - 1 - number) % size], rows[(rank - 2 - number) % size]
        yield _exchange({(rank + 1) % size: sent}, {(rank - 1) % size: received}, group)
        summed.add_(received)


def _all_gather(rows: Tensor, group: Group) -> Rounds:
    """Gather rows [size, n], of which rank k has row k, in place."""
    size, rank = group.size, group.rank
    for number in range(size - 1):
        sent, received = rows[(rank - number) % size], rows[(rank - 1 - number) % size]
        yield _exchange({(rank + 1) % size: sent}, {(rank - 1) % size: received}, group)


def _tree(values: Tensor, group: Group) -> Rounds:
    """Sum over the group, in place. A rank has a depth, and each round is between two depths."""
    parent, children = (group.rank - 1) // 2, [k for k in (2 * group.rank + 1, 2 * group.rank + 2) if k < group.size]
    depth, deepest = _depth(group.rank), _depth(group.size - 1)
    for lower in range(deepest, 0, -1):
        sums = {child: torch.zeros_like(values) for child in children if depth == lower - 1}
        yield _exchange({parent: values} if depth == lower else {}, sums, group)
        for each in sums.values():
            values.add_(each)
    for lower in range(1, deepest + 1):
        down = {child: values for child in children if depth == lower - 1}
        yield _exchange(down, {parent: values} if depth == lower else {}, group)


def _depth(rank: int) -> int:
    return (rank + 1).bit_length() - 1


def _exchange(sent: Mapping[int, Tensor], received: Mapping[int, Tensor], group: Group) -> Pending:
    """Start to send to some ranks of a group and to receive from others, by their index in it.

    In a group that is not connected, what would be received does not change.
    """
    for kind, messages in (("send", sent), ("receive", received)):
        for peer, tensor in messages.items():
            group.record(kind, tensor.nbytes, peer)
    tensors = [*sent.values(), *received.values()]
    if not tensors or tensors[0].is_meta or not group.is_connected:
        return completed(torch.empty(0))
    # In one batch: on NCCL, two messages between the same ranks in opposite directions would block each other.
    message = partial(dist.P2POp, group=group.process_group)
    batch = [message(dist.isend, each, group_peer=peer) for peer, each in sent.items()]
    batch += [message(dist.irecv, each, group_peer=peer) for peer, each in received.items()]
    return Pending(_All(launch(dist.batch_isend_irecv, batch)), torch.empty(0), group)


@dataclass(frozen=True)
class _All:
    """Work of several messages."""

    works: Any

    def wait(self) -> None:
        for work in self.works if isinstance(self.works, list) else [self.works]:
            work.wait()

"""Sums of a bucket's gradients: over micro-batches, then by a reduce-scatter over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megalite.errors import MegaliteError
from megalite.optim.flat import allocate_storage, free_storage, owned
from megalite.optim.layout import BucketLayout
from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from megalite.parallel.parameter import DenseGradient, Gradient, Parameter

REDUCTIONS_IN_FLIGHT = 2
"""Number of buckets whose unsharded gradients are kept while they are reduced during backward, under ZeRO 2 and 3."""

Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True)
class Collective(Generic[Result]):
    """Collective operation of some ranks after a step's list of actions."""

    name: str
    ranks: tuple[int, ...]
    run: Callable[[], Result]


@dataclass(frozen=True)
class ReductionGroups:
    """Groups over which a bucket's gradients are summed."""

    shards: Group
    """Ranks among which the bucket is sharded: a reduce-scatter."""
    instances: Group
    """Ranks with the same slice in the other instances of hybrid sharding."""
    replicas: Group
    """Ranks with the same parameters that each see a part of the gradient, as those with a tied weight's copies."""


class Accumulator:
    """Sums the gradients of a bucket's parameters from their uses in one chunk, and counts those that have arrived.

    A round is what one reduction sums: all micro-batches of a step, under ZeRO 2 and 3 one. Each use has a flat sum of
    its own over the round. The later uses' sums are added to the first's before that is reduced: so the order in which
    a tied weight's gradients are added is the same whether its uses share a rank or not.
    """

    def __init__(
        self,
        layout: BucketLayout,
        groups: ReductionGroups,
        in_flight: list[Accumulator],
        *,
        chunk: int,
        uses: Mapping[int, int],
        stage: int,
        overlap: bool,
        dtype: torch.dtype,
    ) -> None:
        """`uses`: those in the chunk by number, each with its gradients per micro-batch. `in_flight` lists, for all
        buckets together, those of ZeRO 2 and 3 that are being reduced; `overlap`: reduce as soon as the last gradient
        has arrived.
        """
        device = layout.slots[0].parameter.device
        self.chunk, self._gradients_of_use = chunk, dict(uses)
        self.flats = {use: torch.zeros(layout.length, dtype=dtype, device=device) for use in uses}
        """The sum of each use."""
        self.gradients = next(iter(self.flats.values()))
        """The sum of the first use; of all once the reduction has begun."""
        self.gradient_shard = owned(self.gradients, groups.shards)
        """This rank's slice."""
        if stage >= 2:
            self.gradient_shard = self.gradient_shard.clone()
            for flat in self.flats.values():
                free_storage(flat)
        self._groups, self._in_flight, self._stage, self._overlap = groups, in_flight, stage, overlap
        self._slot_of = {id(slot.parameter): slot for slot in layout.slots}
        ends = [0, *(slot.stop for slot in layout.slots)]
        starts = [*(slot.start for slot in layout.slots), layout.length]
        self._gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
        self._rounds = self._rounds_due = self._micro_batches_per_round = 0  # the step's reductions: begun, due
        self._arrived: dict[tuple[int, int], int] = {}  # by parameter and use
        self._outstanding = 0
        self._pending: collectives.Pending | None = None

    @property
    def gradients_per_micro_batch(self) -> int:
        """Number of gradients of all parameters and uses."""
        return len(self._slot_of) * sum(self._gradients_of_use.values())

    def gradient(self, parameter: Parameter, use: int) -> Tensor:
        """The sum of one use's gradients of one of the bucket's parameters, in its shape."""
        slot = self._slot_of[id(parameter)]
        return self.flats[use][slot.start : slot.stop].view(parameter.shape)

    def begin_step(self, micro_batches: int) -> None:
        """Expect the gradients of each use of each parameter in each of `micro_batches`."""
        self._rounds, self._rounds_due = 0, micro_batches if self._stage >= 2 else 1
        self._micro_batches_per_round = micro_batches // self._rounds_due
        self._begin_round()

    def _begin_round(self) -> None:
        self._arrived = {(parameter, use): 0 for use in self.flats for parameter in self._slot_of}
        self._outstanding = self.gradients_per_micro_batch * self._micro_batches_per_round

    def add(self, parameter: Parameter, gradient: Gradient, use: int) -> None:
        """Add a gradient. After the last of a round the reduction starts if it overlaps backward, or if the next round
        needs the buffer.
        """
        key, due = (id(parameter), use), self._due(use)
        if self._arrived[key] == due:
            name = parameter.sharding.name
            raise MegaliteError(f"{name} received more than the {due} gradients due: its `uses` is wrong")
        if self._stage >= 2 and self._outstanding == self.gradients_per_micro_batch * self._micro_batches_per_round:
            self._allocate()  # the first gradient of a round
        # The first gradient of each use overwrites what the buffer holds from the last round, or new memory: so it need
        # not be set to zero.
        gradient.add_to(self.gradient(parameter, use), overwrite=self._arrived[key] == 0)
        self._arrived[key] += 1
        self._outstanding -= 1
        if self._outstanding == 0 and (self._overlap or self._stage >= 2):
            self._launch_reduction()

    def _due(self, use: int) -> int:
        """Return the number of gradients of a parameter in a round."""
        return self._gradients_of_use[use] * self._micro_batches_per_round

    def _allocate(self) -> None:
        self._finish_round()
        for flat in self.flats.values():
            allocate_storage(flat)
            for start, stop in self._gaps:  # padding is reduced too, and must not be NaN
                flat[start:stop].zero_()

    def _launch_reduction(self) -> None:
        """Check that all gradients have arrived, add up the uses and start the reduction; ZeRO 2 and 3 then wait until
        at most REDUCTIONS_IN_FLIGHT are running, without overlap until none is.
        """
        for (parameter, use), arrived in self._arrived.items():
            if arrived != (due := self._due(use)):
                name = self._slot_of[parameter].parameter.sharding.name
                raise MegaliteError(f"{name} received {arrived} of the {due} gradients due: is it used in forward?")
        _, *later = self.flats.values()
        for flat in later:
            self.gradients.add_(flat)
            if self._stage >= 2:
                free_storage(flat)
        self._pending = self._begin_reduce_scatter()
        self._rounds += 1
        if self._rounds < self._rounds_due:
            self._begin_round()
        if self._stage >= 2:
            self._in_flight.append(self)
            while len(self._in_flight) > (REDUCTIONS_IN_FLIGHT if self._overlap else 0):
                self._in_flight[0]._finish_round()

    def _begin_reduce_scatter(self) -> collectives.Pending:
        """Start to sum over the shard group; the result is this rank's slice: in place, or a tensor that
        `_finish_round` adds to it.
        """
        out = None if self._stage >= 2 else self.gradient_shard
        return collectives.reduce_scatter_async(self.gradients, self._groups.shards, out=out)

    def _finish_round(self) -> None:
        """Wait for the running reduction, if there is one; ZeRO 2 and 3 add its slice to this rank's and free the
        buffer.
        """
        if self._pending is None:
            return
        slice_of_sum = self._pending.wait()
        self._pending = None
        if self._stage >= 2:
            self._in_flight.remove(self)
            DenseGradient(slice_of_sum).add_to(self.gradient_shard, overwrite=self._rounds == 1)
            free_storage(self.gradients)

    def begin_reduction(self, micro_batches: int) -> None:
        """Start the reduction that is due after this number of micro-batches, unless it has begun.

        Raises MegaliteError, naming a parameter, if gradients have not arrived.
        """
        if self._rounds < micro_batches // self._micro_batches_per_round:
            self._launch_reduction()

    def completion(self) -> Iterator[Collective[object]]:
        """Yield the operations that complete this rank's slice, once a step, after the last of its reductions."""
        yield Collective("wait for the gradients' reduction", self._groups.shards.ranks, self._finish)
        for kind, group in (("instances", self._groups.instances), ("replicas", self._groups.replicas)):
            summed = partial(collectives.all_reduce_in_rank_order_, self.gradient_shard, group)
            yield Collective(f"sum of the gradients over {kind}", group.ranks, summed)

    def _finish(self) -> None:
        if self._rounds < self._rounds_due:
            raise RuntimeError(f"of {self._rounds_due} reductions that a step has, {self._rounds} were begun")
        self._finish_round()

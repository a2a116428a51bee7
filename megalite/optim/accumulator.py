"""Sums of a bucket's gradients, over micro-batches and then over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megalite.errors import MegaliteError
from megalite.optim.flat import allocate_storage, free_storage, owned
from megalite.optim.layout import BucketLayout
from megalite.optim.reduction import Collective, Reduction
from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from megalite.parallel.parameter import DenseGradient, Gradient, Parameter

REDUCTIONS_IN_FLIGHT = 2
"""Number of buckets whose unsharded gradients are kept while they are reduced during backward, under ZeRO 2 and 3."""


class Accumulator:
    """Flat gradients of a bucket's parameters from their uses in one chunk, and the counting of what has arrived.

    Each use has a sum of its own, over the micro-batches of a round. The later uses' are added to the first's before
    that is reduced: the order of a tied weight's sums is the same whether its uses share a rank or not.
    """

    def __init__(
        self,
        layout: BucketLayout,
        shard_group: Group,
        reduction: Reduction,
        in_flight: list[Accumulator],
        *,
        chunk: int,
        uses: Mapping[int, int],
        stage: int,
        overlap: bool,
        dtype: torch.dtype,
    ) -> None:
        """`uses`: the numbers of those in the chunk, each with its gradients a micro-batch. `in_flight` lists, for all
        buckets together, those of ZeRO 2 and 3 that are being reduced; `overlap`: reduce as soon as the last gradient
        has arrived.
        """
        device = layout.slots[0].parameter.device
        self.chunk, self.reduction, self._times = chunk, reduction, dict(uses)
        self.flats = {use: torch.zeros(layout.length, dtype=dtype, device=device) for use in uses}
        """The sum of each use."""
        self.gradients = next(iter(self.flats.values()))
        """The sum of the first use; of all once the reduction has begun."""
        self.gradient_shard = owned(self.gradients, shard_group)
        """This rank's slice."""
        if stage >= 2:
            self.gradient_shard = self.gradient_shard.clone()
            for flat in self.flats.values():
                free_storage(flat)
        self._shard_group, self._in_flight, self._stage, self._overlap = shard_group, in_flight, stage, overlap
        self._slot_of = {id(slot.parameter): slot for slot in layout.slots}
        ends = [0, *(slot.stop for slot in layout.slots)]
        starts = [*(slot.start for slot in layout.slots), layout.length]
        self._gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
        self._rounds = self._rounds_due = self._micro_batches_a_round = 0  # the step's reductions: begun, due
        self._arrived: dict[tuple[int, int], int] = {}  # by parameter and use
        self._outstanding = 0
        self._pending: collectives.Pending | None = None

    @property
    def gradients_a_micro_batch(self) -> int:
        """Number of gradients that all parameters and uses give."""
        return len(self._slot_of) * sum(self._times.values())

    def gradient(self, parameter: Parameter, use: int) -> Tensor:
        """The sum of one use's gradients of one of the bucket's parameters, in its shape."""
        slot = self._slot_of[id(parameter)]
        return self.flats[use][slot.start : slot.stop].view(parameter.shape)

    def begin_step(self, micro_batches: int) -> None:
        """Expect the gradients of each use of each parameter in each of `micro_batches`."""
        self._rounds, self._rounds_due = 0, micro_batches if self._stage >= 2 else 1
        self._micro_batches_a_round = micro_batches // self._rounds_due
        self._begin_round()

    def _begin_round(self) -> None:
        self._arrived = {(parameter, use): 0 for use in self.flats for parameter in self._slot_of}
        self._outstanding = self.gradients_a_micro_batch * self._micro_batches_a_round

    def add(self, parameter: Parameter, gradient: Gradient, use: int) -> None:
        """Add a gradient. After the last that is due in a round the reduction starts if it overlaps backward, or if the
        next round needs the buffer.
        """
        key, due = (id(parameter), use), self._due(use)
        if self._arrived[key] == due:
            name = parameter.sharding.name
            raise MegaliteError(f"{name} received more than the {due} gradients due: its `uses` is wrong")
        if self._stage >= 2 and self._outstanding == self.gradients_a_micro_batch * self._micro_batches_a_round:
            self._allocate()
        gradient.add_to(self.gradient(parameter, use), overwrite=self._arrived[key] == 0)
        self._arrived[key] += 1
        self._outstanding -= 1
        if self._outstanding == 0 and (self._overlap or self._stage >= 2):
            self._launch_reduction()

    def _due(self, use: int) -> int:
        """Gradients of a parameter in a round."""
        return self._times[use] * self._micro_batches_a_round

    def _allocate(self) -> None:
        self._finish_round()
        for flat in self.flats.values():
            allocate_storage(flat)
            for start, stop in self._gaps:
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
        self._pending = self.reduction.begin(self.gradients, None if self._stage >= 2 else self.gradient_shard)
        self._rounds += 1
        if self._rounds < self._rounds_due:
            self._begin_round()
        if self._stage >= 2:
            self._in_flight.append(self)
            while len(self._in_flight) > (REDUCTIONS_IN_FLIGHT if self._overlap else 0):
                self._in_flight[0]._finish_round()

    def _finish_round(self) -> None:
        """Wait for the reduction under way, if there is one; ZeRO 2 and 3 add its slice to this rank's and free the
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
        """Start the reduction that is due after so many micro-batches, unless it has begun. Raises MegaliteError,
        naming a parameter, if gradients have not arrived.
        """
        if self._rounds < micro_batches // self._micro_batches_a_round:
            self._launch_reduction()

    def completion(self) -> Iterator[Collective[object]]:
        """Steps that complete this rank's slice of the step's gradients."""
        yield Collective("wait for the gradients' reduction", self._shard_group.ranks, self._finish)
        yield from self.reduction.completion(self.gradient_shard)

    def _finish(self) -> None:
        if self._rounds < self._rounds_due:
            raise RuntimeError(f"of {self._rounds_due} reductions that a step has, {self._rounds} were begun")
        self._finish_round()

"""Accumulation of a bucket's gradients over micro-batches, then a reduce-scatter over the data-parallel ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megalite.errors import MegaliteError
from megalite.offload.transfers import Copy
from megalite.optim.flat import allocate_storage, free_storage, owned
from megalite.optim.layout import BucketLayout
from megalite.optim.reduction import Reduction
from megalite.parallel import collectives
from megalite.parallel.parameter import DenseGradient, Gradient, Parameter
from megalite.parallel.sharding import Use

REDUCTIONS_IN_FLIGHT = 2
"""Maximum number of buckets that are reduced at the same time during backward, under ZeRO 2 and 3.

The unsharded gradients of a bucket stay in memory until its reduction has finished.
"""

Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True)
class StepCollective(Generic[Result]):
    """Collective operation that runs after a step's list of actions, among some of the ranks."""

    name: str
    ranks: tuple[int, ...]
    run: Callable[[], Result]


class Accumulator:
    """Sum of the gradients of a bucket's parameters from their uses in one chunk, with a count of arrived gradients.

    A round is the set of micro-batches that one reduction covers: all micro-batches of a step under ZeRO 0 and 1, a
    single one under ZeRO 2 and 3. Each use of the parameters has its own flat sum per round, so a tied weight's
    gradients from one use are added first, whether its uses are on the same rank or not. Before the reduction, the sums
    of the later uses in this chunk are added to the sum of the first one. A late sum is made only then if its
    gradients can be kept so long (`KeptGradients`). Uses in other chunks have an accumulator of their own, and are
    added after the reduction: by `Bucket.completion` on the same rank, otherwise by `sum_partial`.
    """

    def __init__(
        self,
        layout: BucketLayout,
        reduction: Reduction,
        in_flight: list[Accumulator],
        *,
        chunk: int,
        uses: Mapping[int, Use],
        stage: int,
        overlap: bool,
        dtype: torch.dtype,
        allow_unused: bool | None = None,
    ) -> None:
        """Allocate the sums.

        Args:
            layout: the parameters of the bucket and their positions in it.
            reduction: the sum over the ranks.
            in_flight: the accumulators that are being reduced under ZeRO 2 and 3; one list shared by all buckets.
            chunk: the chunk whose gradients are summed.
            uses: the uses in this chunk, by their numbers.
            stage: the ZeRO stage.
            overlap: start the reduction as soon as the last gradient has arrived.
            dtype: the dtype of the sums.
            allow_unused: start a reduction only in `begin_reduction`; gradients that are missing then are zero. False:
                name this setting if gradients are missing.
        """
        device = layout.slots[0].parameter.device
        self.chunk, self.uses = chunk, dict(uses)
        summed = [number for number, use in uses.items() if not use.late_sum] or list(uses)
        self.flats = {use: torch.zeros(layout.length, dtype=dtype, device=device) for use in summed}
        """Flat sum of each use whose gradients are added as they arrive, by the number of the use."""
        self._kept = {use: KeptGradients(layout, dtype) for use in uses if use not in self.flats}
        self.gradients = next(iter(self.flats.values()))
        """Flat sum of the first of these uses. Once the reduction has started, it is the sum of all uses."""
        self.gradient_shard = owned(self.gradients, reduction.groups.shards)
        """Slice of the gradients that this rank owns."""
        self._views = {  # made once, and as long as there is memory: there is one look-up per gradient
            (id(slot.parameter), use): flat[slot.start : slot.stop].view(slot.parameter.shape)
            for use, flat in self.flats.items()
            for slot in layout.slots
        }
        if stage >= 2 or reduction.own_slice:
            self.gradient_shard = self.gradient_shard.clone()
        if stage >= 2:
            for flat in self.flats.values():
                free_storage(flat)
        self.reduction, self._in_flight, self._stage, self._overlap = reduction, in_flight, stage, overlap
        self._allow_unused = allow_unused
        self._slot_of = {id(slot.parameter): slot for slot in layout.slots}
        slots = self._slot_of.items()
        self._times = {(key, use): slot.parameter.sharding.uses[use].times for use in uses for key, slot in slots}
        self.gradients_per_micro_batch = sum(self._times.values())
        """Number of gradients per micro-batch, over all parameters and uses."""
        ends = [0, *(slot.stop for slot in layout.slots)]
        starts = [*(slot.start for slot in layout.slots), layout.length]
        self._gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
        # Number of reductions in this step: those that have started, and those that are expected in total.
        self._rounds = self._rounds_due = self._micro_batches_per_round = 0
        self._arrived: dict[tuple[int, int], int] = {}  # number of gradients by (id of the parameter, use)
        self._due: dict[tuple[int, int], int] = {}  # and of those expected in a round
        self._outstanding = self._outstanding_at_first = 0
        self._pending: collectives.Pending | _Leaving | None = None
        self.leaving: Callable[[collectives.Pending | None], Sequence[Copy]] | None = None
        """Begins the copies of the slice to the host, once its last sum has ended; None: it has none that early."""

    def gradient(self, parameter: Parameter, use: int) -> Tensor:
        """Return the summed gradient of one parameter from a use in `flats`, in the parameter's shape."""
        return self._views[id(parameter), use]

    def begin_step(self, micro_batches: int) -> None:
        """Reset the counts and expect the gradients of this number of micro-batches."""
        self._rounds, self._rounds_due = 0, micro_batches if self._stage >= 2 else 1
        self._micro_batches_per_round = micro_batches // self._rounds_due
        self._due = {key: times * self._micro_batches_per_round for key, times in self._times.items()}
        self._begin_round()

    def _begin_round(self) -> None:
        for use, kept in self._kept.items():
            kept.begin_round(sum(self._due[parameter, use] for parameter in self._slot_of))
        self._arrived = dict.fromkeys(self._due, 0)
        self._outstanding = self._outstanding_at_first = self.gradients_per_micro_batch * self._micro_batches_per_round

    def add(self, parameter: Parameter, gradient: Gradient, use: int) -> None:
        """Add a gradient.

        The last gradient of a round starts the reduction, if the reduction overlaps backward or if the next round needs
        the buffer (ZeRO 2 and 3).
        """
        key = id(parameter), use
        if (arrived := self._arrived[key]) == (due := self._due[key]):
            name = parameter.sharding.name
            raise MegaliteError(f"{name} received more than the {due} gradients due: its `uses` is wrong")
        if self._stage >= 2 and self._outstanding == self._outstanding_at_first:
            self._allocate()  # this is the first gradient of a round
        if use in self._kept:
            self._kept[use].add(parameter, gradient)
        else:  # The first one overwrites the buffer: its old or uninitialized values need not be set to zero.
            gradient.add_to(self._views[key], overwrite=arrived == 0)
        self._arrived[key] = arrived + 1
        self._outstanding -= 1
        if self._outstanding == 0 and (self._overlap or self._stage >= 2) and not self._allow_unused:
            self._launch_reduction()

    def leave_out(self) -> None:
        """Take the gradients of one micro-batch as zeros that have arrived, under ZeRO 0 and 1."""
        self._fill_in_zeros()
        for key, times in self._times.items():
            self._arrived[key] += times
        self._outstanding -= self.gradients_per_micro_batch
        if self._outstanding == 0 and self._overlap and not self._allow_unused:
            self._launch_reduction()

    def _allocate(self) -> None:
        self._finish_round()
        for flat in self.flats.values():
            allocate_storage(flat)
            for start, stop in self._gaps:  # The padding is reduced too, so it must not contain NaN.
                flat[start:stop].zero_()

    def _launch_reduction(self) -> None:
        """Check that all gradients have arrived or may be missing, add up the uses and start the reduction.

        Under ZeRO 2 and 3, then wait until at most REDUCTIONS_IN_FLIGHT reductions are running (none without overlap).
        """
        if self._allow_unused:
            self._fill_in_zeros()
        elif self._outstanding:
            raise MegaliteError(self._missing())
        for kept in self._kept.values():
            self.gradients.add_(kept.total())
        _, *later = self.flats.values()
        for flat in later:
            self.gradients.add_(flat)
            if self._stage >= 2:
                free_storage(flat)
        self._pending = pending = self._begin_sum()
        if self.leaving is not None and self._stage < 2:
            self._pending = _Leaving(self.leaving(pending), self.gradient_shard)
        self._rounds += 1
        if self._rounds < self._rounds_due:
            self._begin_round()
        if self._stage >= 2:
            self._in_flight.append(self)
            while len(self._in_flight) > (REDUCTIONS_IN_FLIGHT if self._overlap else 0):
                self._in_flight[0]._finish_round()

    def _fill_in_zeros(self) -> None:
        """Set the gradients to zero of which none has arrived in this round."""
        if self._stage >= 2 and not any(self._arrived.values()):
            self._allocate()
        for (parameter, use), arrived in self._arrived.items():
            if not arrived and use in self.flats:
                self.gradient(self._slot_of[parameter].parameter, use).zero_()

    def _missing(self) -> str:
        """Name the parameters whose gradients have not all arrived."""
        missing = [
            (self._slot_of[parameter].parameter.sharding.name, arrived, due)
            for (parameter, use), arrived in self._arrived.items()
            if arrived != (due := self._due[parameter, use])
        ]
        (name, arrived, due), *others = missing
        also = f" (also too few: {', '.join(other for other, *_ in others[:9])})" if others else ""
        advice = "" if self._allow_unused is None else " If a step may leave it out, give Trainer(allow_unused=True)"
        return f"{name} received {arrived} of the {due} gradients due: is it used in forward?{advice}{also}"

    def _begin_sum(self) -> collectives.Pending:
        """Start the sum over the shard group.

        Under ZeRO 0 and 1 the result is written into this rank's slice. Under ZeRO 2 and 3 it is a new tensor,
        which `_finish_round` adds to the slice.
        """
        out = None if self._stage >= 2 else self.gradient_shard
        return self.reduction.begin(self.gradients, out)

    def _finish_round(self) -> None:
        """Wait for the running reduction, if there is one.

        Under ZeRO 2 and 3, then add its result to this rank's slice and free the buffer.
        """
        if self._pending is None:
            return
        slice_of_sum = self._pending.wait()
        self._pending = None
        if self._stage >= 2:
            self._in_flight.remove(self)
            DenseGradient(slice_of_sum).add_to(self.gradient_shard, overwrite=self._rounds == 1)
            free_storage(self.gradients)
            if self.leaving is not None and self._rounds == self._rounds_due:
                self.leaving(None)

    def begin_reduction(self, micro_batches: int) -> None:
        """Start the reduction that is due after this number of micro-batches, unless it has already started.

        Raises:
            MegaliteError: a gradient has not arrived; the message names the parameter.
        """
        if self._rounds < micro_batches // self._micro_batches_per_round:
            self._launch_reduction()

    def completion(self) -> Iterator[StepCollective[object]]:
        """Yield the operations that complete this chunk's slice, once per step, after its last reduction."""
        groups = self.reduction.groups
        yield StepCollective("wait for the gradients' reduction", groups.shards.ranks, self._finish)
        summed = partial(self.reduction.sum_over_instances, self.gradient_shard)
        yield StepCollective("sum of the gradients over instances", groups.instances.ranks, summed)

    def sum_partial(self) -> StepCollective[object]:
        """Return the operation that sums the slices of a partial group, once they have the uses in all chunks.

        Its ranks may have different numbers of uses.
        """
        group = self.reduction.groups.partial
        summed = partial(collectives.all_reduce_in_rank_order_, self.gradient_shard, group)
        return StepCollective("sum of the partial gradients", group.ranks, summed)

    def _finish(self) -> None:
        if self._rounds < self._rounds_due:
            raise RuntimeError(f"only {self._rounds} of the {self._rounds_due} reductions of a step have begun")
        self._finish_round()


@dataclass(frozen=True)
class _Leaving:
    """A sum in progress whose result is then copied to the host."""

    copies: Sequence[Copy]
    result: Tensor

    def wait(self) -> Tensor:
        for copy in self.copies:
            copy.release()
        return self.result


class KeptGradients:
    """Sum of a round's gradients from one use, such as that of an embedding that is also the output layer.

    They are kept if they take no more memory than their sum.
    It has the bits of a flat sum to which each gradient is added when it arrives, because they are added in the same
    order. That flat sum has memory only from when it is needed. If the gradients of the round can be kept, this is when
    `total` is called: then the sum and all of them take memory. Otherwise, it is from the first gradient on: then none
    of them does. It is also from a gradient on that must be added at once, or is so much larger than those before it
    that they cannot be kept.
    """

    def __init__(self, layout: BucketLayout, dtype: torch.dtype) -> None:
        self._layout, self._dtype = layout, dtype
        self._places = {id(slot.parameter): slot for slot in layout.slots}
        self._kept: deque[tuple[Parameter, Gradient]] = deque()
        self._bytes = self._due = 0
        self._sum: Tensor | None = None

    def begin_round(self, due: int) -> None:
        """Begin a new round with this number of gradients."""
        self._kept.clear()
        self._bytes, self._due, self._sum = 0, due, None

    def add(self, parameter: Parameter, gradient: Gradient) -> None:
        self._kept.append((parameter, gradient))
        if self._sum is not None or not self._can_keep(gradient.kept_bytes):
            self._add_up()

    def _can_keep(self, size: int | None) -> bool:
        """Tell whether the gradients of the round can be kept, if those due have this size in bytes."""
        if size is None or self._bytes + self._due * size > self._layout.length * self._dtype.itemsize:
            return False
        self._bytes, self._due = self._bytes + size, self._due - 1
        return True

    def total(self) -> Tensor:
        """Return the flat sum [length of the bucket] of the round's gradients, and keep none of them."""
        found, self._sum = self._add_up(), None
        return found

    @torch.no_grad()
    def _add_up(self) -> Tensor:
        """Add the gradients in the order of their arrival to the flat sum, and free each."""
        if self._sum is None:
            device = self._layout.slots[0].parameter.device
            self._sum = torch.zeros(self._layout.length, dtype=self._dtype, device=device)
        while self._kept:
            parameter, gradient = self._kept.popleft()
            slot = self._places[id(parameter)]
            gradient.add_to(self._sum[slot.start : slot.stop].view(parameter.shape), overwrite=False)
        return self._sum

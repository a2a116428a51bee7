"""Survivors of a failure finish their micro-batches of the step, and keep the gradients for the next generation.

Before gradients are reduced, all ranks wait for each other at a *gate*. If a rank fails before it has come there, the
agents ask the others. A rank that is asked writes the sums of its gradients, none of which has been reduced, into
memory. The ranks that start again divide the micro-batches that are left of the step, and each adds what its memory
has to what it computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint import TrainingState
from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.tensors import TensorBox
from megalite.data.sampler import Deal
from megalite.errors import CommunicationError
from megalite.extras.recovery.choice import Taken
from megalite.extras.recovery.generation import generation
from megalite.extras.recovery.marks import Marks
from megalite.extras.recovery.slot import Slot, Whose, byte_ranges, seal
from megalite.extras.recovery.unfinished import Kept, deal_of_rest, usable
from megalite.optim.buckets import DataParallel
from megalite.optim.reduction import Reduction
from megalite.parallel import collectives
from megalite.parallel.mesh import WORLD, ParallelMesh
from megalite.parallel.sharding import Box
from megalite.parallel.stage import LossTerm, TermSums, add_sums
from megalite.pipeline.engine import RunningStep, StepObserver
from megalite.pipeline.offloading import proved
from megalite.pipeline.schedules import Action
from megalite.run.run import RunSynchronization
from megalite.torch_internals import Store, new_process_group
from megalite.training.gradients import Gradients
from megalite.training.loss_terms import Totals
from megalite.training.metrics import StepMetrics
from megalite.training.trainer import Trainer

_SECTION = "unfinished_step"
KEPT = "kept_micro_batches"
_PLACE = ("pp", "cp", "tp")
ASKING_SECONDS = 15.0
"""Time for the agents to ask, once a rank has noticed by itself that another one has failed."""
END_SECONDS = 60.0
"""Time for the agent to end a rank that has kept its gradients."""


class KeptReduction(Reduction):
    """Sum of a bucket's gradients, to which what was kept is added before; or which is kept instead of reduced.

    Attributes:
        parts: names of the bucket's parameters that no other sum of the rank has, each with its first element, and one
            past its last.
        kept: what this rank has kept of each [elements]; empty: nothing.
        room: memory for each [elements], if the sums are to be kept now.
    """

    parts: Sequence[tuple[str, int, int]] = ()
    kept: Mapping[str, Tensor] = MappingProxyType({})
    room: Mapping[str, Tensor] = MappingProxyType({})

    def begin(self, gradients: Tensor, out: Tensor | None) -> collectives.Pending:
        """Start to sum [length] over the shard group, or write it into memory."""
        for name, start, stop in self.parts if self.kept else ():
            gradients[start:stop].add_(self.kept[name].to(gradients.device))
        if not self.room:
            return super().begin(gradients, out)
        for name, start, stop in self.parts:
            self.room[name].copy_(gradients[start:stop])
        return collectives.completed(gradients if out is None else out)


@dataclass
class _Delayed(StepObserver):
    """Actions of a step, without its reductions."""

    inner: StepObserver | None
    reductions: list[tuple[int, int]] = field(default_factory=list)
    """Chunk and number of micro-batches of each reduction that is due."""

    def execute(self, action: Action, step: RunningStep) -> None:
        """Run an action, or note that a reduction is due."""
        if action.kind == "R":
            self.reductions.append((action.chunk, action.micro_batch + 1))
        elif self.inner is None:
            step.execute(action)
        else:
            self.inner.execute(action, step)


class CopiesTaken(Protocol):
    """Copies in memory, as far as this trainer needs them."""

    def taken(self) -> int:
        """Return the step of the last copy."""

    def settle(self) -> None:
        """Wait until it has been completed."""


@dataclass(frozen=True)
class _Memory:
    """Memory of a rank for its gradients, and what it is to write beside them."""

    slot: Slot
    parts: Sequence[TensorBox]
    whose: Whose
    begun: tuple[int, int | None]
    """Step from which this start has continued, and the random number of the start in which that state arose."""
    copies: CopiesTaken
    """Copies that are taken in this start."""

    @property
    def room(self) -> dict[str, Tensor]:
        """Return the memory of each part, by name."""
        ranges = byte_ranges(self.parts)
        return {
            part.name: self.slot.memory[where.start : where.stop].view(part.dtype)
            for part, where in zip(self.parts, ranges, strict=True)
        }

    def base(self, step: int) -> tuple[int, int] | None:
        """Return the state after a step, as `Kept.base` names it; None if there is no copy of it."""
        mark = self.begun[1] if step == self.begun[0] else self.whose.mark if step == self.copies.taken() else None
        return None if mark is None else (step, mark)


@dataclass(frozen=True)
class _Rest:
    """Part of the next step that the ranks have kept."""

    deal: Deal
    """This rank's part of what is left."""
    own: Kept | None
    """Gradients that this rank has kept."""
    counts: Totals
    done: int
    """Number of micro-batches that are done."""


class SurvivorsTrainer(Trainer):
    """Trainer of a rank that keeps the gradients of a step when another rank fails, and goes on with what was kept.

    It does so from `begin` on.
    """

    _memory: _Memory | None = None
    _marks: Marks | None = None
    _gate: dist.ProcessGroup | None = None
    _rest: _Rest | None = None

    # ------------------------------------------------------------------------------------------------ at the start

    def kept_parts(self) -> list[TensorBox]:
        """Return the sums of gradients that this rank may keep, and give them their names."""
        parts, numbers = list[TensorBox](), dict[str, int]()
        for accumulator in (each for bucket in self.optimizer.updated for each in bucket.accumulators):
            named = list[tuple[str, int, int]]()
            for slot in accumulator.reduction.spec.layout.slots:
                plain = slot.parameter.sharding.name
                numbers[plain] = numbers.get(plain, 0) + 1
                named.append((f"{plain} {numbers[plain]}", slot.start, slot.stop))
                shape = (slot.stop - slot.start,)
                parts.append(TensorBox(named[-1][0], shape, accumulator.gradients.dtype, Box.whole(shape)))
            cast(KeptReduction, accumulator.reduction).parts = named
        return parts

    def begin(self, slot: Slot, whose: Whose, continued: Taken | None, copies: CopiesTaken) -> str | None:
        """Take what ranks have kept of the next step. Called by all ranks together. Returns a line about it.

        Args:
            slot: memory for the gradients, with room for them.
            whose: this rank, in this start.
            continued: the copies from which this start continues; None: something else.
            copies: the copies that are taken in this start.
        """
        begun = self.iteration, None if continued is None else continued.mark
        self._memory = memory = _Memory(slot, self.kept_parts(), whose, begun, copies)
        self._marks = marks = Marks(slot.descriptor)
        self.sections.is_finishing = lambda: marks.is_computing
        mesh = self.mesh
        name, everyone = partial(_gate_name, mesh.rank), range(mesh.world_size)
        self._gate = new_process_group(mesh.rank, everyone, name, None, backend="gloo")
        generation().tell_replicas(*_replicas(mesh))
        places = [_place(mesh, rank) for rank in range(mesh.world_size)]
        told = collectives.all_gather_json(self._found(), mesh)
        found = usable([None if each is None else Kept.of(each) for each in told], places)
        micro_batches = self.task.batch_size.at(self.consumed_samples) // self.config.training.micro_batch_size
        done = sorted({number for kept in found.values() for number in kept.done})
        if not done or done[-1] >= micro_batches:
            one = "note: --survivors-finish-step: all ranks are of one replica, so that none can finish a step alone"
            return one if mesh.size("dp") == 1 else None
        replicas = range(mesh.size("dp"))
        deals = [deal_of_rest(done, micro_batches, replica, len(replicas)) for replica in replicas]
        if any(deal.empty for deal in deals) and not self.task.has_empty_slots:
            return None
        numbers = sorted({deal.slots for deal in deals})
        self.schedules.prove(training=numbers, mesh=mesh)
        if self.task.offloading is not None:
            for number in numbers:
                proved(self.schedules.training(number), self.task.offloading.layers, self.task.offloading.ends)
        own, counts = found.get(mesh.rank), next(iter(found.values())).counts
        self._rest = _Rest(deals[mesh.coordinate("dp")], own, counts, len(done))
        if own is not None:
            for reduction in self._reductions:
                reduction.kept = memory.room
        return (
            f"step {self.iteration + 1}: {len(done)} of {micro_batches} micro-batches have been kept by the ranks that "
            f"had not failed; the ranks divide the other {micro_batches - len(done)}"
        )

    def _found(self) -> dict[str, Any] | None:
        """Return what this rank has kept of the next step, if every byte is as it was written."""
        assert self._memory is not None
        memory, slot = self._memory, self._memory.slot
        header = slot.header()
        if header is None or header.whose.run != memory.whose.run or not slot.is_intact():
            return None
        described = slot.manifest()
        saved = [box for tensor in described.tensors.values() for box in tensor.boxes]
        ranges = zip(memory.parts, byte_ranges(memory.parts), strict=True)
        wanted = {(part.name, part.shape, part.dtype, where.start) for part, where in ranges}
        if {(box.name, box.shape, box.dtype, box.start) for box in saved} != wanted:
            return None
        found: dict[str, Any] = described.config[_SECTION]
        base = memory.base(self.iteration)
        return found if base is not None and found["base"] == list(base) else None

    @property
    def _reductions(self) -> list[KeptReduction]:
        found = [accumulator.reduction for bucket in self.optimizer.updated for accumulator in bucket.accumulators]
        return cast(list[KeptReduction], found)  # of the class that `Survivors.options` gives

    # ------------------------------------------------------------------------------------------------ one step

    def next_deal(self) -> Deal:
        """Return this rank's part of the next step, without the micro-batches whose gradients have been kept."""
        return super().next_deal() if self._rest is None else replace(self._rest.deal, left_out=self.left_out)

    def _counts(self, terms: Sequence[LossTerm], own: TermSums) -> tuple[Totals, Totals]:
        """Return the counts of the terms over the global batch, and those by which gradients are divided: the same."""
        counts = super()._counts(terms, own) if self._rest is None else (self._rest.counts, self._rest.counts)
        if self._marks is not None:  # from here to the gate, a rank needs no other replica
            self._marks.set_computing(self._can_keep)
        return counts

    def forward_backward(
        self,
        micro_batches: Sequence[Any] | None = None,
        terms: Sequence[LossTerm] | None = None,
        multipliers: Callable[[Totals], Totals] = dict,
        observer: StepObserver | None = None,
    ) -> Gradients:
        """Compute the gradients of one global batch, and reduce them if no rank has failed until then."""
        if self._marks is None:
            return super().forward_backward(micro_batches, terms, multipliers, observer)
        delayed = _Delayed(observer or self.shares.observer)
        try:
            gradients = super().forward_backward(micro_batches, terms, multipliers, delayed)
            if self._rest is not None:
                size = self.task.batch_size.at(self.consumed_samples)
                sums = gradients.sums if self._rest.own is None else _added(gradients.sums, self._rest.own.sums)
                gradients = replace(gradients, sums=sums, batch_size=size)
            reductions = sorted(delayed.reductions)  # the same order with any number of micro-batches
            if reductions and not self._pass_gate():
                self._keep(gradients, reductions)
        finally:  # the agent and the watchdog wait no longer
            self._marks.set_computing(False)
        for chunk, number in reductions:
            self.optimizer.reduce(chunk, number)
        return gradients

    def update(self, gradients: Gradients, figures: Mapping[str, float] = MappingProxyType({})) -> StepMetrics:
        """Update the weights by the gradients of `forward_backward`. Called by all ranks together."""
        if self._rest is None:
            return super().update(gradients, figures)
        metrics = super().update(gradients, {**figures, KEPT: self._rest.done})
        self._rest = None
        for reduction in self._reductions:
            reduction.kept = {}
        self._skipped = None  # to locate what was not finite, a second run would lack what was kept
        return metrics

    @property
    def _can_keep(self) -> bool:
        """Tell whether gradients of the next step would be of use: there is a copy of the state before it. A step whose
        time line is drawn reduces its gradients in the engine, without the gate."""
        assert self._memory is not None
        drawn = self.iteration + 1 == self.config.profiling.profile_pipeline
        return not drawn and self._memory.base(self.iteration) is not None

    def _pass_gate(self) -> bool:
        """Wait for all ranks. Returns False if the agent asks to keep the gradients instead.

        Raises CommunicationError if a rank has ended, and nobody asks.
        """
        assert self._marks is not None
        began, pause = time.perf_counter(), 2e-5
        work = dist.all_reduce(torch.zeros(1), group=self._gate, async_op=True)
        assert work is not None
        while not work.is_completed():
            if self._marks.is_asked:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        try:
            work.wait()
        except RuntimeError as error:  # it has ended, and its agent will know
            noticed = time.perf_counter()
            while not self._marks.is_asked:
                if time.perf_counter() - noticed > ASKING_SECONDS:
                    raise CommunicationError(f"a rank has ended in the step: {str(error).splitlines()[0]}") from error
                time.sleep(pause)
            return False
        self.mesh.waits.by_axis[WORLD] += time.perf_counter() - began
        return True

    def _keep(self, gradients: Gradients, reductions: Sequence[tuple[int, int]]) -> NoReturn:
        """Write the sums into memory, tell the agent, and wait for the end.

        Raises CommunicationError if it does not come.
        """
        memory, kept = self._memory, self._description(gradients)
        assert memory is not None
        assert self._marks is not None
        if kept is not None:
            memory.slot.discard()
            for reduction in self._reductions:
                reduction.room = memory.room
            for chunk, number in reductions:
                self.optimizer.reduce(chunk, number)
            memory.copies.settle()
            state = TrainingState(self.iteration, self.consumed_samples, self.optimizer.steps)
            seal(memory.slot, memory.whose, memory.parts, Manifest(state, {_SECTION: asdict(kept)}, {}, {}))
        self._marks.set_computing(False)
        time.sleep(END_SECONDS)
        raise CommunicationError(f"another rank has failed in step {self.iteration + 1}, and this one was not ended")

    def _description(self, gradients: Gradients) -> Kept | None:
        """Return what is to be kept of this step; None if nobody could use it."""
        assert self._memory is not None
        base = self._memory.base(self.iteration)
        sums = {name: value.tolist() for name, value in gradients.sums.items()}
        if base is None or not all(value.isfinite().all() for value in gradients.sums.values()):
            return None
        before = () if self._rest is None or self._rest.own is None else self._rest.own.done
        done = tuple(sorted({*before, *self.next_deal().numbers}))
        place, replica = _place(self.mesh, self.mesh.rank), self.mesh.coordinate("dp")
        return Kept(self._memory.whose.mark, base, replica, place, done, sums, gradients.counts)


def _added(sums: TermSums, kept: Mapping[str, float | list[float]]) -> TermSums:
    return add_sums(sums, {name: torch.tensor(value, dtype=torch.float64) for name, value in kept.items()})


def _place(mesh: ParallelMesh, rank: int) -> tuple[int, ...]:
    coordinates = mesh.coordinates_of(rank)
    return tuple(number for axis in _PLACE for number in (coordinates[axis], mesh.size(axis)))


def _replicas(mesh: ParallelMesh) -> tuple[int, int]:
    """Return the stride and the number of replicas: rank r is in replica r // stride % number."""
    replicas = [mesh.coordinates_of(rank)["dp"] for rank in range(mesh.world_size)]
    stride = replicas.index(1) if 1 in replicas else len(replicas)
    number = mesh.size("dp")
    assert replicas == [rank // stride % number for rank in range(mesh.world_size)]
    return stride, number


def _gate_name(rank: int, store: Store) -> str:
    return f"megalite gate #{store.add(f'megalite gate of {rank}', 1)}"


class Survivors(RunSynchronization):
    """Plain data parallelism whose reductions can be kept."""

    trainer = SurvivorsTrainer

    def options(self, plain: DataParallel) -> DataParallel:
        """Return the options of data parallelism, with reductions that can be kept."""
        return replace(plain, reduction=KeptReduction)

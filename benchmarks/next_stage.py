"""The next stage of a pipeline on the rank before it: its forward in idle time, and its update.

It stands here and not in megalite, which does not compute stages twice (`docs/memory_checkpoints.md` says why).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.checkpoint.plan import held_regions
from megalite.config.pipeline_layout import stage_layers
from megalite.config.run import RunConfig
from megalite.optim.learning_rate import Rates
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import StageOutput
from megalite.pipeline.engine import RunningStep
from megalite.pipeline.schedules import Action, Kind
from megalite.pipeline.simulator import Duration, simulate
from megalite.pipeline.stages import Stages
from megalite.tasks.gpt_task import GPTTask
from megalite.training import builder
from megalite.training.trainer import Trainer

AGAIN: Kind = "W"
"""Kind of the redundant forwards in the lists of the simulator, where they wait for no message, as W does not."""


@dataclass(frozen=True)
class Placement:
    """Lists of all ranks with their redundant forwards, and the share of these that fits into idle time, by rank."""

    orders: list[list[Action]]
    fitting: list[float]

    @staticmethod
    def of(stages: Stages, orders: Sequence[Sequence[Action]], duration: Duration) -> Placement:
        """Place the forwards of the next stage, in order, where a rank waits and has their input: its own output. Those
        that fit nowhere are the last of the rank's list.
        """
        spans = simulate(stages, orders, duration)
        end = max(own[-1].end for own in spans)
        placed, fitting = [], []
        for rank, own in enumerate(spans):
            took, now, order = duration(rank, AGAIN), 0.0, list[Action]()
            ready = {span.action.micro_batch: span.end for span in own if span.action.kind == "F"}
            if rank == stages.ranks - 1:
                ready = dict.fromkeys(ready, 0.0)  # the first stage takes tokens, which every rank has
            left = sorted(ready)
            for span in own:
                while left and max(now, ready[left[0]]) + took <= span.start:
                    now = max(now, ready[left[0]]) + took
                    order.append(Action(AGAIN, left.pop(0)))
                order.append(span.action)
                now = span.end
            at_the_end = min(len(left), int((end - now) / took))
            fitting.append(1 - (len(left) - at_the_end) / len(ready))
            placed.append([*order, *(Action(AGAIN, micro_batch) for micro_batch in left)])
        return Placement(placed, fitting)


class NextStage:
    """The stage of the next rank on this one: its weights, their optimizer, and its forward."""

    def __init__(self, config: RunConfig, task: GPTTask, rank: int, ranks: int) -> None:
        """Build it. Initial values depend on names alone: they are the next rank's."""
        self.owner, self.keeper = (rank + 1) % ranks, (rank - 1) % ranks
        alone = ParallelMesh()  # nothing that is computed here is summed over ranks
        layers = stage_layers(task.model, config.parallel)[self.owner]
        self.chunks = builder.make_networks(config, task.model, alone, [layers], (0,))
        self.optimizer = builder.make_optimizer(config, self.chunks, alone, Stages(), task.set_values)
        self.chunks[0].train()

    def forward(self, inputs: Mapping[str, Tensor], micro_batch: Any) -> StageOutput:
        taken = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
        output: StageOutput = self.chunks[0](taken, micro_batch)
        return output

    def exchange_gradients(self, trainer: Trainer) -> None:
        """Send the gradients of this rank's own stage to the rank that keeps it, and receive those of the next one."""
        works = []
        for number, (own, other) in enumerate(zip(trainer.optimizer.buckets, self.optimizer.buckets, strict=True)):
            works.append(dist.irecv(other.gradient_shard, self.owner, tag=number))
            works.append(dist.isend(own.gradient_shard, self.keeper, tag=number))
        for work in works:
            assert work is not None
            work.wait()

    def update(self, rates: Rates, gradient_norm: float) -> None:
        """Update the weights as the next rank does: rates and the norm are those of all ranks."""
        self.optimizer.update(rates, gradient_norm)

    def size(self) -> int:
        """Return the bytes of weights, gradients and state."""
        regions = held_regions(nn.ModuleList(self.chunks), self.optimizer)
        held = {(region.part.name, region.part.box): region.part.size for region in regions}
        gradients = sum(bucket.gradients.nbytes for bucket in self.optimizer.buckets)
        return sum(held.values()) + gradients


class Observer:
    """Observer of a step: runs the forwards of the next stage between its actions, and measures each computation.

    Attributes:
        outputs: what this rank's own stage has returned, by micro-batch.
        kept: what the next stage has returned here, with its graph, by micro-batch.
        seconds: seconds of the CPU of each F, B and redundant forward.
    """

    def __init__(self, stage: NextStage, micro_batches: Sequence[Any], order: Sequence[Action]) -> None:
        """Take the micro-batches of a step, and this rank's list with its redundant forwards, or without any."""
        self.stage, self.micro_batches = stage, micro_batches
        self.outputs: dict[int, StageOutput] = {}
        self.kept: dict[int, StageOutput] = {}
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._before: dict[Action, list[int]] = {}
        self._left: list[int] = []
        for action in order:
            if action.kind == AGAIN:
                self._left.append(action.micro_batch)
            else:
                self._before[action], self._left = self._left, []

    def execute(self, action: Action, step: RunningStep) -> None:
        if action.kind not in ("F", "B"):
            step.execute(action)
            return
        self._run_again(self._before.get(action, ()))
        step.wait_for_message(action)
        began = time.thread_time()
        step.execute(action)
        self.seconds[action.kind].append(time.thread_time() - began)

    def finish(self) -> None:
        """Run what has found no place within the step."""
        self._run_again(self._left)

    def inputs(self, micro_batch: int) -> Mapping[str, Tensor]:
        """Return what the next stage takes: the output of this rank's own, or nothing if it is the first."""
        return {} if self.stage.owner == 0 else self.outputs[micro_batch].tensors

    def _run_again(self, micro_batches: Iterable[int]) -> None:
        for micro_batch in micro_batches:
            began = time.thread_time()
            with torch.enable_grad():
                self.kept[micro_batch] = self.stage.forward(self.inputs(micro_batch), self.micro_batches[micro_batch])
            self.seconds[AGAIN].append(time.thread_time() - began)


def saved_bytes(stage: NextStage, inputs: Mapping[str, Tensor], micro_batch: Any) -> int:
    """Return the bytes that the graph of a redundant forward keeps; weights do not count."""
    weights = {each.untyped_storage().data_ptr() for each in stage.chunks[0].parameters()}
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = stage.forward(inputs, micro_batch)
    del output
    return sum(each.untyped_storage().nbytes() for pointer, each in storages.items() if pointer not in weights)


def captured(run: Callable[..., StageOutput], outputs: dict[int, StageOutput]) -> Callable[..., StageOutput]:
    """Return a stage that leaves its outputs in `outputs`: forwards come in the order of micro-batches."""

    def stage(inputs: Mapping[str, Tensor], micro_batch: Any) -> StageOutput:
        output = run(inputs, micro_batch)
        detached = ({name: each.detach() for name, each in part.items()} for part in output)
        outputs[len(outputs)] = StageOutput(*detached)
        return output

    return stage

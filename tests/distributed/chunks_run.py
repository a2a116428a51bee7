"""Execution of a step's list of actions over all chunks of a pipeline on one rank, without messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from megalite.config.pipeline_layout import StageLayers
from megalite.model import gpt
from megalite.model.batch import MicroBatch
from megalite.model.head import LossConfig
from megalite.optim import optimizer as optim
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import Optimizer
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.schedules import Action
from megalite.pipeline.stages import Stages
from tests.distributed.layout_cell import LAYERS, RECOMPUTE, Cell, loss_terms, model_config, optimizer_config, rates
from tests.distributed.layout_run import (
    Held,
    held,
    local_micro_batches,
    perturb_constants,
    several_chunks_of_logits,
    with_messages,
)
from tests.harness.stages import LOSS
from tests.harness.unsharded import unsharded_parameters

Observe = Callable[[Action], None]


@dataclass
class Rank:
    """Executor of a list of actions."""

    network: nn.ModuleList
    engine: PipelineEngine[MicroBatch]
    optimizer: Optimizer
    mesh: ParallelMesh

    @staticmethod
    def build(cell: Cell, chunks: int, bucket_size: int | None = None) -> Rank:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        mesh = ParallelMesh(rank=rank, world_size=world_size, tensor_parallel_size=cell.tp)
        each = LAYERS // chunks
        parts = [StageLayers(c * each, each, embedding=c == 0, loss=c == chunks - 1) for c in range(chunks)]
        made = gpt.make_chunks(
            model_config(cell),
            mesh,
            parts,
            (mesh.rank,),
            sequence_parallel=cell.sequence_parallel,
            recompute=RECOMPUTE[cell.recompute],
            loss=LossConfig(fused=cell.fused_loss, **loss_terms(cell)),
            dtype=cell.torch_dtype,
        )
        network = nn.ModuleList(made)
        initialize(network, seed=1)
        perturb_constants(network)
        options = DataParallel(
            cell.torch_gradient_dtype,
            cell.zero,
            cell.instances,
            bucket_size,
            overlap_reduce=cell.overlap != "none",
            overlap_gather=cell.overlap == "reduce and gather",
        )
        blocks = [chunk.blocks() for chunk in made]
        optimizer = optim.make_optimizer(made, mesh, optimizer_config(cell), options, blocks=blocks)
        stages = with_messages(Stages(1, chunks, v_shaped=True), cell)
        engine = PipelineEngine(made, stages, device=mesh.device)
        return Rank(network, engine, optimizer, mesh)

    def step(self, cell: Cell, number: int, actions: Sequence[Action], observe: Observe = lambda action: None) -> float:
        """Run a complete step; return the norm of its gradient."""
        self.execute(list(local_micro_batches(cell, number, self.mesh.coordinate("dp"))), actions, observe)
        return self.optimizer.step(rates(cell, number)).gradient_norm

    def execute(
        self, batches: Sequence[MicroBatch], actions: Sequence[Action], observe: Observe = lambda action: None
    ) -> None:
        """Run a step until before the optimizer's update; `observe` is called after every action."""
        self.optimizer.begin_step(len(batches))
        with several_chunks_of_logits():
            self.engine.run(actions, batches, {LOSS: 1.0}, self.optimizer, _Observer(observe))

    def finals(self) -> list[Held]:
        with unsharded_parameters(self.optimizer):
            return held(self.network, self.mesh, lambda parameter: parameter)


@dataclass(frozen=True)
class _Observer:
    """Stand-in for the recorder of a step."""

    observe: Observe

    def execute(self, action: Action, step: Any) -> None:
        step.execute(action)
        self.observe(action)


@dataclass(frozen=True)
class Case:
    """Training of a cell by a list of actions."""

    cell: Cell
    chunks: int
    actions: tuple[Action, ...]


def trained(cases: Sequence[Case], steps: int = 2) -> list[tuple[list[float], list[Held]]]:
    """Return the norms and the final parameters of each case. Under ZeRO 3 all weights are freed after every action."""
    found = []
    for case in cases:
        rank = Rank.build(case.cell, case.chunks, bucket_size=700 if case.cell.overlap != "none" else None)
        sharded = [bucket for bucket in rank.optimizer.buckets if bucket.zero_stage == 3]

        def weights_are_free(action: Action, sharded: list = sharded) -> None:
            for bucket in sharded:
                assert bucket.parameters.untyped_storage().size() == 0, f"{bucket.slots[0].parameter} behind {action}"

        norms = [rank.step(case.cell, number, case.actions, weights_are_free) for number in range(steps)]
        found.append((norms, rank.finals()))
    return found


def actions(text: str, *, reduce_each: bool) -> tuple[Action, ...]:
    """Parse "F0 F0.1 I0.1 W0.1": kind and micro-batch, and after a dot the chunk.

    Each chunk is reduced after its last B or W, or with `reduce_each` after each of them.
    """
    computations = []
    for word in text.split():
        number, _, chunk = word[1:].partition(".")
        computations.append(Action(word[0], int(number), int(chunk or 0)))  # type: ignore[arg-type]
    last = {action.chunk: action for action in computations if action.kind in ("B", "W")}
    found = []
    for action in computations:
        found.append(action)
        if action.kind in ("B", "W") and (reduce_each or last[action.chunk] is action):
            found.append(Action("R", action.micro_batch, action.chunk))
    return tuple(found)

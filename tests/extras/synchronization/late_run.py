"""Steps of a run in which chosen pipelines are late at chosen micro-batches, on every rank of a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.extras.synchronization.late_ranks import LateRanksTrainer, Vote
from megalite.parallel.mesh import ParallelMesh
from megalite.training.data import open_data
from megalite.training.ledger import Decision
from megalite.training.metrics import StepMetrics
from tests.distributed.layout_run import Held, held
from tests.harness.gpt_trainer import gpt_trainer

Plan = Mapping[int, Mapping[int, int]]
"""First micro-batch that is left out, by step and pipeline."""


class Clock:
    """Clock that is past every limit from the look before one micro-batch on. Its first look begins the step."""

    def __init__(self, border: int | None) -> None:
        self.border, self.looks = border, -1

    def __call__(self) -> float:
        self.looks += 1
        return 9.0 if self.border is not None and self.looks > self.border else 0.0


@dataclass(frozen=True)
class Steps:
    """What a rank returns."""

    metrics: Sequence[StepMetrics]
    decisions: Sequence[Sequence[Decision]]
    final: list[Held]
    keys: int
    """Number of keys that are left in the store."""


def late_trainer(flags: str) -> LateRanksTrainer:
    """Return the trainer of this rank, whose decisions depend on no time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = resolve(parse_arguments(flags.split()).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    trainer = gpt_trainer(config, open_data(config), mesh)
    assert isinstance(trainer, LateRanksTrainer)
    trainer.clock = Clock(None)
    return trainer


def step(trainer: LateRanksTrainer, late: Mapping[int, int]) -> StepMetrics:
    """Run a step in which these pipelines are late, by the vote of one that has been done after a second."""
    trainer.clock = Clock(late.get(trainer.pipeline) if trainer.leads else None)
    if late and trainer.leads:
        trainer.board.vote(trainer.runs + 1, Vote(1.0, 0.5))
    return trainer.step()


def run_steps(flags: str, plan: Plan, steps: int) -> Steps:
    """Run the steps of a plan."""
    trainer = late_trainer(flags)
    metrics, decisions = [], []
    with trainer.loader:
        for number in range(1, steps + 1):
            metrics.append(step(trainer, plan.get(number, {})))
            decisions.append(trainer.decisions)
    trainer.optimizer.finish_parameter_gather()
    dist.barrier()
    keys = trainer.board._store.num_keys() if dist.get_rank() == 0 else 0
    return Steps(metrics, decisions, held(nn.ModuleList(trainer.chunks), trainer.mesh, lambda p: p), keys)

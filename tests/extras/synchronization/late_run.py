"""Steps of a run in which chosen pipelines are late at chosen micro-batches, on every rank of a pool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megalite
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError
from megalite.extras.synchronization import late_ranks
from megalite.extras.synchronization.late_ranks import LateRanksTrainer, Vote
from megalite.optim.loss_scale import LossScale
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import StageOutput
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
    """Result of a rank."""

    metrics: Sequence[StepMetrics]
    decisions: Sequence[Sequence[Decision]]
    final: list[Held]
    left: list[int]
    """Steps of which keys are left in the store."""


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
        trainer.board.vote(trainer.begun + 1, Vote(1.0, 0.5))
    return trainer.step()


def run_steps(flags: str, plan: Plan, steps: int, loss_scale: float = 1.0) -> Steps:
    """Run the steps of a plan."""
    trainer = late_trainer(flags)
    trainer.loss_scale = LossScale(loss_scale)
    metrics, decisions = [], []
    with trainer.loader:
        for number in range(1, steps + 1):
            metrics.append(step(trainer, plan.get(number, {})))
            decisions.append(trainer.decisions)
    trainer.optimizer.finish_parameter_gather()
    dist.barrier()  # all have deleted what they delete
    left = [number for number in range(1, steps + 1) if is_there(trainer, number)]
    return Steps(metrics, decisions, held(nn.ModuleList(trainer.chunks), trainer.mesh, lambda p: p), left)


def is_there(trainer: LateRanksTrainer, number: int) -> bool:
    """Tell whether the store still has the vote or a decision of a step."""
    keys = [
        late_ranks._VOTE_IN.format(number),
        *(late_ranks._DECISION.format(number, trainer.pipeline, m) for m in range(12)),
    ]
    return any(trainer.board._mailbox.look(key) is not None for key in keys)


def spoiled_steps(
    flags: str, spoiled: Sequence[int], late: Mapping[int, int]
) -> tuple[list[bool], list[str | None], bool]:
    """Run two steps, the second with a loss of NaN for some samples and with late pipelines, and a third.

    Returns which were skipped, the report on the second, and whether it has changed weights.
    """
    trainer = late_trainer(flags)

    def spoil(module: nn.Module, arguments: tuple[Any, ...], output: StageOutput) -> StageOutput:
        if not set(arguments[1].sample_ids) & set(spoiled):
            return output
        return output._replace(terms={name: term * math.nan for name, term in output.terms.items()})

    for chunk in trainer.chunks:
        chunk.register_forward_hook(spoil)
    with trainer.loader:
        steps = [step(trainer, {})]
        before = [bucket.parameters.clone() for bucket in trainer.optimizer.buckets]
        steps.append(step(trainer, late))
        reports = [trainer.locate_not_finite()]
        changed = any(not torch.equal(a, b.parameters) for a, b in zip(before, trainer.optimizer.buckets, strict=True))
        steps.append(step(trainer, {}))
    return [each.skipped for each in steps], reports, changed


class Reversed(nn.Module):
    """Layers that run in the reverse of the order in which they are registered, so that buckets do not end in order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(6))

    def forward(self, values: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            values = values + layer(values).tanh()
        return values


def own_model(late: Mapping[int, Mapping[int, int]], steps: int, bucket_size: int) -> tuple[list[float], list[Tensor]]:
    """Train a model of a program, with overlapping reductions. Returns the losses and the weights."""
    points = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with megalite.Trainer(
        Reversed(),
        loss=squares,
        count=lambda batch: batch[1].sum(),
        dataset=[(point, torch.tensor(1.0 + number % 3)) for number, point in enumerate(points)],
        shuffle=False,
        optimizer=megalite.SGD(lr=0.1, weight_decay=0.0, clip_grad=0.0),
        layout=megalite.Layout(overlap=True),
        precision="fp64",
        micro_batch_size=1,
        global_batch_size=8,
        quiet=True,
        watchdog=False,
        ddp_bucket_size=bucket_size,
        drop_stragglers_after=2.0,
    ) as run:
        trainer = run._trainer
        assert isinstance(trainer, LateRanksTrainer)
        assert len(trainer.optimizer.buckets) > 2
        losses = []
        for number in range(1, steps + 1):
            trainer.clock = Clock(late.get(number, {}).get(trainer.pipeline))
            if number in late:
                trainer.board.vote(trainer.begun + 1, Vote(1.0, 0.5))
            losses.append(run.step()["loss"])
        return losses, [each.detach().clone() for each in trainer.network.parameters()]


def squares(outputs: Tensor, batch: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares, each sample as often as it counts."""
    return (outputs.square().sum(1) * batch[1]).sum()


def refused(flags: str) -> str:
    """Return why a trainer is refused."""
    with pytest.raises(ConfigurationError) as raised:
        late_trainer(flags)
    return str(raised.value)


def batch_norm_refused() -> str:
    """Return why a model whose ranks meet in every micro-batch is refused."""
    with pytest.raises(ConfigurationError) as raised:
        megalite.Trainer(
            nn.Sequential(megalite.SyncBatchNorm(4), nn.Linear(4, 4)),
            loss=lambda outputs, batch: outputs.square().mean(),
            dataset=[(torch.ones(4), torch.ones(1))] * 8,
            optimizer=megalite.SGD(lr=0.1),
            micro_batch_size=2,
            quiet=True,
            watchdog=False,
            drop_stragglers_after=2.0,
        )
    return str(raised.value)

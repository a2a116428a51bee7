"""Runs of a rank that trains with a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from megalite.config import DataConfig, ParallelConfig, RunConfig
from megalite.config.distillation import DistillationConfig
from megalite.extras.post_training.distillation import Teacher, distilled_terms
from megalite.training import loss_terms
from tests.distributed.layout_cell import Cell, model_config, rates
from tests.distributed.layout_run import Held, whole_gradients
from tests.distributed.post_training_run import Policy, run_config


@dataclass(frozen=True)
class Distilled:
    """Result of a step with a teacher on a rank."""

    gradients: list[Held]
    means: dict[str, float]
    """Means of the terms of the loss, over all ranks."""
    gathered: int
    """Number of bytes of the teacher's gathered parameters after the step."""
    same: bool
    """True if the teacher's hidden states after the step are those before it, bit for bit."""
    separate: bool
    """True if the optimizer and the network have no parameter of the teacher."""


def configuration(cell: Cell, folder: Path, settings: DistillationConfig) -> RunConfig:
    """Return the configuration of a run of the cell with a teacher."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=cell.tp,
        pipeline_model_parallel_size=cell.pp,
        context_parallel_size=cell.cp,
        sequence_parallel=cell.sequence_parallel,
    )
    plain = run_config(cell, model_config(cell))
    data, settings = DataConfig(seq_length=cell.sequence), replace(settings, distill_from=str(folder))
    training = replace(plain.training, micro_batch_size=cell.micro_batch_size)
    return replace(plain, parallel=parallel, data=data, training=training, distillation=settings)


def distilled_steps(cells: Sequence[Cell], folder: Path, settings: DistillationConfig) -> list[Distilled]:
    """Run a step of each cell with the teacher in a folder."""
    return [_step(Policy.of(cell), configuration(cell, folder, settings)) for cell in cells]


def _step(policy: Policy, config: RunConfig) -> Distilled:
    network, mesh = nn.ModuleList(policy.chunks), policy.mesh
    for chunk in policy.chunks:
        chunk.main_terms = distilled_terms(config.distillation)
    terms = loss_terms.declared_terms(policy.chunks)
    teacher = Teacher(config, policy.chunks, policy.engine, policy.optimizer, policy.schedules)
    plain = policy.micro_batches
    counts = loss_terms.total_counts(terms, loss_terms.counted(terms, plain, mesh.device), mesh)
    network.train()
    actions, optimizer = policy.schedules.training(len(plain)), policy.optimizer
    compared = teacher.compared(plain)
    optimizer.begin_step(len(plain))
    sums = policy.engine.run(actions, compared, loss_terms.loss_multipliers(terms, counts, 1.0), optimizer)
    optimizer.complete()
    gradients = whole_gradients(network, mesh, optimizer.buckets)
    means = dict(loss_terms.means(loss_terms.total_sums(terms, sums, mesh), counts))
    optimizer.step(rates(policy.cell, 0))
    pairs = zip(compared, teacher.compared(plain), strict=True)
    kept = [[each.logit_loss.values.args[0] for each in pair if each.logit_loss is not None] for pair in pairs]
    own = {id(parameter) for parameter in teacher.network.network.parameters()}
    trained = {id(slot.parameter) for bucket in optimizer.buckets for slot in bucket.slots}
    return Distilled(
        gradients,
        means,
        sum(parameter.untyped_storage().size() for parameter in teacher.network.network.parameters()),
        all(torch.equal(*pair) for pair in kept if pair),
        own.isdisjoint(trained | {id(parameter) for parameter in network.parameters()}),
    )

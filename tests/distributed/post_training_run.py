"""Runs of a rank that trains with a loss function, generates, and exports its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalite.inference.sampling import Sampling
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.optim.flat import is_storage_free
from megalite.optim.optimizer import Optimizer
from megalite.parallel.mesh import ParallelMesh
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.lowering import Reductions
from megalite.pipeline.point_to_point import make_links
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.post_training.log_probabilities import (
    LOSS,
    TokenOutputs,
    forward_backward,
    log_probabilities,
    totals,
)
from megalite.post_training.rollout import Rollout, generate, log_probability_difference, to_micro_batches
from tests.distributed.layout_cell import Cell, rates
from tests.distributed.layout_run import (
    Held,
    initialized_chunks,
    local_micro_batches,
    make_meshes,
    make_optimizer,
    whole_gradients,
    with_messages,
)

ENTROPY = 0.3
"""Coefficient of the entropy in the loss function of the tests."""


@dataclass
class Policy:
    """Network of a cell with the parts of a run that post-training needs."""

    cell: Cell
    mesh: ParallelMesh
    chunks: list[GPT]
    optimizer: Optimizer
    engine: PipelineEngine[MicroBatch]
    schedules: ProvedSchedules

    @staticmethod
    def of(cell: Cell) -> Policy:
        """Make the parts on this rank."""
        mesh = make_meshes([cell])[cell.split]
        chunks = initialized_chunks(mesh, cell)
        optimizer = make_optimizer(chunks, mesh, cell)
        stages, rank = with_messages(cell.stages, cell), mesh.coordinate("pp")
        engine = PipelineEngine(chunks, stages, rank, make_links(mesh, stages), mesh.device)
        count = [cell.samples // (cell.dp * cell.micro_batch_size)]
        reductions = Reductions(optimizer.reduces_each_micro_batch, cell.overlap != "none")
        schedules = ProvedSchedules(stages, rank, schedule=cell.schedule_name, reductions=reductions)
        return Policy(cell, mesh, chunks, optimizer, engine, schedules.prove(count, count, mesh=mesh))

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Return this rank's samples of step 0."""
        return list(local_micro_batches(self.cell, 0, self.mesh.coordinate("dp"), self.mesh.coordinate("cp")))


def clipped_loss(outputs: TokenOutputs, batch: MicroBatch) -> Mapping[str, Tensor]:
    """Return PPO's clipped loss against made-up old log-probabilities, less the entropies."""
    assert batch.loss_mask is not None
    assert outputs.entropies is not None
    return loss_of(outputs.log_probabilities, outputs.entropies, batch.tokens, batch.loss_mask)


def loss_of(log_probabilities: Tensor, entropies: Tensor, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the sums of `clipped_loss`, given tensors [batch, sequence]."""
    old = -3.0 - 0.1 * torch.cos(tokens.to(log_probabilities.dtype))
    advantages = torch.sin(1.0 + tokens.to(log_probabilities.dtype))
    ratio = (log_probabilities - old).exp()
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = ((-clipped - ENTROPY * entropies) * mask).sum()
    return {LOSS: loss, "ratio": (ratio * mask).sum()}


@dataclass(frozen=True)
class PolicyResult:
    """Result of a policy's step on a rank."""

    gradients: list[Held]
    figures: dict[str, float]
    outputs: dict[int, tuple[Tensor, Tensor]]
    """Log-probabilities and entropies of this rank's samples, by number."""


def policy_steps(cells: Sequence[Cell]) -> list[PolicyResult]:
    """Run the loss function's step of each cell."""
    return [_policy_step(Policy.of(cell)) for cell in cells]


def _policy_step(policy: Policy) -> PolicyResult:
    micro_batches, network = policy.micro_batches, nn.ModuleList(policy.chunks)
    count, options = len(micro_batches), {"entropies": True}
    evaluated = log_probabilities(
        policy.chunks, policy.engine, policy.schedules.evaluation(count), micro_batches, **options
    )
    network.train()
    actions = policy.schedules.training(count)
    multipliers = {LOSS: 0.1}
    sums = forward_backward(
        policy.engine, actions, micro_batches, clipped_loss, policy.optimizer, multipliers, **options
    )
    policy.optimizer.complete()
    gradients = whole_gradients(network, policy.mesh, policy.optimizer.buckets)
    outputs: dict[int, tuple[Tensor, Tensor]] = {}
    for micro_batch, found in zip(micro_batches, evaluated, strict=True):
        assert found.entropies is not None
        rows = zip(micro_batch.key.samples, found.log_probabilities, found.entropies, strict=True)
        outputs.update((sample, (one, other)) for sample, one, other in rows)
    return PolicyResult(gradients, totals(sums, policy.mesh), outputs)


PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [11], [3, 2, 3], [8, 4, 6, 2]]
EOD = 7


@dataclass(frozen=True)
class RolloutResult:
    """Result of a generation on a rank, after a training step."""

    rollouts: dict[int, Rollout]
    """Rollouts by the number of their prompt."""
    figures: dict[str, float]
    """Differences between generation and training."""
    whole_weights: int
    """Number of parameters under ZeRO 3 that are still gathered."""


def rollouts(cells: Sequence[Cell], sampling: Sampling) -> list[RolloutResult]:
    """Generate with each cell's network after a step of training, and score what was generated."""
    return [_rollouts(Policy.of(cell), sampling) for cell in cells]


def _rollouts(policy: Policy, sampling: Sampling) -> RolloutResult:
    cell, mesh, network = policy.cell, policy.mesh, nn.ModuleList(policy.chunks)
    network.train()
    micro_batches = policy.micro_batches
    actions = policy.schedules.training(len(micro_batches))
    factors = {LOSS: 0.1}
    forward_backward(policy.engine, actions, micro_batches, clipped_loss, policy.optimizer, factors, entropies=True)
    policy.optimizer.step(rates(cell, 0))
    numbers = range(mesh.coordinate("dp"), len(PROMPTS), cell.dp)
    found = generate(
        policy.chunks,
        policy.engine,
        policy.optimizer,
        [PROMPTS[number] for number in numbers],
        max_new_tokens=5 + mesh.coordinate("dp"),  # data-parallel ranks need not be in step
        eod=EOD,
        sampling=sampling,
    )
    assert network.training
    freed = [bucket for bucket in policy.optimizer.buckets if bucket.zero_stage == 3]
    gathered = sum(not is_storage_free(bucket.parameters) for bucket in freed)
    count = len(micro_batches)
    batches = to_micro_batches(
        found,
        micro_batch_size=cell.micro_batch_size,
        sequence_length=cell.sequence,
        dtype=cell.torch_dtype,
        device=mesh.device,
        micro_batches=count,
    )
    scored = [batch.micro_batch for batch in batches]
    outputs = log_probabilities(policy.chunks, policy.engine, policy.schedules.evaluation(count), scored)
    masks = [batch.micro_batch.loss_mask for batch in batches if batch.micro_batch.loss_mask is not None]
    figures = log_probability_difference([batch.log_probabilities for batch in batches], outputs, masks, mesh)
    return RolloutResult(dict(zip(numbers, found, strict=True)), figures, gathered)

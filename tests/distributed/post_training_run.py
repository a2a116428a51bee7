"""Runs of a rank that trains with a loss function, generates, and exports its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.checkpoint import Saver, TrainingState
from megalite.checkpoint.tensors import Kind
from megalite.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from megalite.conversion.huggingface import open_huggingface
from megalite.errors import CheckpointError
from megalite.extras.post_training import receivers
from megalite.extras.post_training.export import export_weights
from megalite.extras.post_training.log_probabilities import (
    LOSS,
    Multipliers,
    TokenOutputs,
    log_probabilities,
    totals,
    with_loss,
)
from megalite.extras.post_training.reference import Reference, load_teacher
from megalite.extras.post_training.rollout import Rollout, generate, log_probability_difference, to_micro_batches
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
from tests.distributed import layout_cell
from tests.distributed.layout_cell import Cell, model_config, rates
from tests.distributed.layout_run import (
    Held,
    initialized_chunks,
    local_micro_batches,
    make_meshes,
    make_optimizer,
    make_plan,
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
    return {LOSS: loss, "ratio": (ratio.detach() * mask).sum()}


def forward_backward(policy: Policy) -> dict[str, Tensor]:
    """Add the gradients of the tests' loss function to the optimizer's buffers. Returns this rank's sums by name."""
    micro_batches = with_loss(policy.micro_batches, clipped_loss, entropies=True)
    actions = policy.schedules.training(len(micro_batches))
    policy.optimizer.begin_step(len(micro_batches))
    return policy.engine.run(actions, micro_batches, Multipliers({LOSS: 0.1}), policy.optimizer)


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
    plain = log_probabilities(policy.chunks, policy.engine, policy.schedules.evaluation(count), micro_batches)
    for one, other in zip(plain, evaluated, strict=True):  # without the entropies, the loss may be fused
        torch.testing.assert_close(one.log_probabilities, other.log_probabilities, rtol=1e-12, atol=1e-12)
        assert one.entropies is None
    network.train()
    sums = forward_backward(policy)
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
    training_step(policy)
    numbers = range(mesh.coordinate("dp"), len(PROMPTS), cell.dp)
    found = generate(
        policy.chunks,
        policy.engine,
        policy.optimizer,
        [PROMPTS[number] for number in numbers],
        max_new_tokens=5 + mesh.coordinate("dp"),  # data-parallel ranks need not be in step
        eod=EOD,
        sampling=sampling,
        batch_size=1 if cell.sequence_parallel else None,
    )
    assert network.training
    freed = [bucket for bucket in policy.optimizer.buckets if bucket.zero_stage == 3]
    gathered = sum(not is_storage_free(bucket.parameters) for bucket in freed)
    count = len(policy.micro_batches)
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


class Kept:
    """Receiver that keeps what it is given, on rank 0."""

    def __init__(self, fails: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.config: Mapping[str, Any] = {}
        self.largest_box, self.fails, self.abandoned, self.finished = 0, fails, False, False

    def begin(self, tensors: Mapping[str, Kind], config: Mapping[str, Any]) -> None:
        self.config = config
        self.tensors = {name: torch.full(kind.shape, torch.nan, dtype=kind.dtype) for name, kind in tensors.items()}

    def box(self, name: str, row: int, values: Tensor) -> None:
        if self.fails:
            raise OSError("no space left")
        self.largest_box = max(self.largest_box, values.numel())
        self.tensors[name][row : row + len(values)] = values

    def finish(self) -> None:
        self.finished = True

    def abandon(self) -> None:
        self.abandoned = True


def exports(cells: Sequence[Cell], directory: Path, box: int) -> list[tuple[Path, Kept]]:
    """Save each cell's weights after a step as a checkpoint, and export them; return the checkpoint, and what came."""
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receivers, "BOX", box)
        for number, cell in enumerate(cells):
            policy = Policy.of(cell)
            training_step(policy)
            saver = Saver(directory / f"run{number}", policy.optimizer, make_plan(policy.mesh, cell))
            config = run_config(cell, model_config(cell))
            path = saver.save(TrainingState(1, cell.samples, policy.optimizer.steps), asdict(config))
            assert isinstance(path, Path)
            kept = Kept()
            export_weights(policy.chunks, policy.optimizer, kept)
            results.append((path, kept))
    return results


def training_step(policy: Policy) -> None:
    """Run a step on the tests' loss function."""
    nn.ModuleList(policy.chunks).train()
    forward_backward(policy)
    policy.optimizer.step(rates(policy.cell, 0))


def run_config(cell: Cell, model: ModelConfig) -> RunConfig:
    """Return the configuration of a run of the cell, as conversion reads it."""
    fields: dict[str, Any] = {"float64": {"fp64": True}, "bfloat16": {"bf16": True}}.get(cell.dtype, {})
    return RunConfig(
        model=replace(model, moe_router_bias_update_rate=ModelConfig.moe_router_bias_update_rate),
        data=DataConfig(seq_length=cell.sequence),
        optimizer=OptimizerConfig(lr=0.0),
        training=TrainingConfig(micro_batch_size=1, **fields),
    )


def failing_export(cell: Cell) -> tuple[str, bool]:
    """Return the message of an export whose receiver fails, and whether it was abandoned."""
    policy, kept = Policy.of(cell), Kept(fails=True)
    with pytest.raises(CheckpointError) as raised:
        export_weights(policy.chunks, policy.optimizer, kept)
    return str(raised.value), kept.abandoned


def references(cells: Sequence[Cell]) -> list[tuple[float, float, float, int]]:
    """Return, for each cell, how far the log-probabilities of a reference are from those of the network when it was
    made: at once, and after a step of training; from those after the step once it has been refreshed; and the number of
    bytes of its gathered parameters.
    """
    return [_reference(Policy.of(cell)) for cell in cells]


def _reference(policy: Policy) -> tuple[float, float, float, int]:
    micro_batches = policy.micro_batches
    actions = policy.schedules.evaluation(len(micro_batches))

    def of_network() -> Tensor:
        found = log_probabilities(policy.chunks, policy.engine, actions, micro_batches)
        return torch.stack([outputs.log_probabilities for outputs in found])

    def of_reference() -> Tensor:
        found = reference.log_probabilities(actions, micro_batches)
        return torch.stack([outputs.log_probabilities for outputs in found])

    before = of_network()
    reference = Reference(policy.chunks, policy.engine, policy.optimizer)
    assert not any(parameter.requires_grad for chunk in reference.chunks for parameter in chunk.parameters())
    at_once = (of_reference() - before).abs().max().item()
    training_step(policy)
    later = (of_reference() - before).abs().max().item()
    assert (of_network() - before).abs().max() > 1e-6
    reference.refresh()
    refreshed = (of_reference() - of_network()).abs().max().item()
    parameters = nn.ModuleList(reference.chunks).parameters()
    return at_once, later, refreshed, sum(parameter.untyped_storage().size() for parameter in parameters)


def teachers(cells: Sequence[Cell], folder: Path) -> list[tuple[list[int], Tensor, int]]:
    """Return, for each cell, its samples of step 0 on this rank, the log-probabilities that a teacher from a folder
    gives them, and the number of bytes of the teacher's gathered parameters.
    """
    found = []
    for cell in cells:
        policy = Policy.of(cell)
        teacher = load_teacher(open_huggingface(folder), policy.chunks, policy.engine, policy.optimizer)
        actions = policy.schedules.evaluation(len(policy.micro_batches))
        outputs = torch.cat(
            [each.log_probabilities for each in teacher.log_probabilities(actions, policy.micro_batches)]
        )
        samples = [sample for micro_batch in policy.micro_batches for sample in micro_batch.key.samples]
        gathered = sum(parameter.untyped_storage().size() for parameter in teacher.network.parameters())
        found.append((samples, outputs, gathered))
    return found


def exported(cell: Cell, folder: Path) -> Tensor:
    """Export a cell's initial weights into a folder, with wider hidden states than others have, and return the
    log-probabilities of its samples.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_cell, "HIDDEN", 24)
        policy = Policy.of(cell)
    export_weights(policy.chunks, policy.optimizer, folder)
    actions = policy.schedules.evaluation(len(policy.micro_batches))
    found = log_probabilities(policy.chunks, policy.engine, actions, policy.micro_batches)
    return torch.cat([each.log_probabilities for each in found])

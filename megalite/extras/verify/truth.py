"""The first steps of a run on one process: over its samples, from its weights, in fp64 or in a precision of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.checkpoint.manifest import OPTIMIZER, STATE
from megalite.checkpoint.plan import held_regions
from megalite.config import RunConfig
from megalite.data.blend import Dataset
from megalite.data.fields import SampleFields
from megalite.data.loader import MicroBatchArrays
from megalite.data.sampler import equal_deal
from megalite.errors import CheckpointError
from megalite.extras.verify.command import OF_ROUTERS, Command, Precision, one_process
from megalite.extras.verify.rounding import TRUTH, Numerics, emulations
from megalite.extras.verify.saved import MASTER, Saved
from megalite.model.batch import MicroBatch, TokenLoss
from megalite.model.head import LM_LOSS
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import StepResult, clipping
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.sequence import SequenceLayout, zigzag
from megalite.parallel.state import states_of
from megalite.run.run import make_trainer
from megalite.tasks.gpt_task import GPTTask
from megalite.training.batches import Cutting, to_micro_batches
from megalite.training.builder import make_chunks, make_stages, model_dtype
from megalite.training.data import RunData, open_data
from megalite.training.loss_terms import Totals

PRECISION_OF: Mapping[torch.dtype, Precision] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
_LOSS_SCALE = 2.0**12
"""Factor of the loss in emulated fp16 runs: gradients underflow without one, and overflow above 65504."""


@dataclass(frozen=True)
class Step:
    """Figures of one step.

    Attributes:
        loss: mean of the language-model loss over the tokens of the global batch that count.
        token_losses: the losses of these tokens, in the order of the samples, without terms of label smoothing.
        norm: norm of the gradient before it is clipped.
        norms: norms of the gradients of the logical tensors.
        others: the other terms of the loss, with their weights.
        scheduled: number of samples that the schedules had counted before it.
        next_scheduled: the number after it.
        clip: factor by which gradients are clipped.
    """

    loss: float
    token_losses: Tensor
    norm: float
    norms: Mapping[str, float]
    others: float
    scheduled: int
    next_scheduled: int
    clip: float


def open_data_of(command: Command, recorded: Dataset[SampleFields] | None = None) -> RunData:
    """Open the data of a run, with the samples that it has recorded, if these are known.

    Raises DataError or ConfigurationError if the data are not here.
    """
    config, _ = one_process(command, "fp64")
    if recorded is None:
        return open_data(config)
    # Recorded masks of the loss have the weights of tokens.
    made_up = replace(config.data, mock_data=True, data_path=(), data_mix_schedule=None, loss_weights=())
    return replace(open_data(replace(config, data=made_up)), train=recorded)


def with_vocabulary(command: Command, start: Saved | None) -> RunConfig:
    """Return the configuration with the rows of the vocabulary that count in the softmax.

    In Megatron-LM, padded ones do.
    """
    config = command.config
    rows = config.model.vocab_size
    if start is not None:
        rows = start.weights.config.vocab_size
    elif command.program == "megatron" and rows is not None:
        rows = config.model.padded_vocab_size(config.parallel.tensor_model_parallel_size)
    return replace(config, model=replace(config.model, vocab_size=rows))


class OneProcess:
    """A run on one process.

    Attributes:
        consumed: number of samples that the run has consumed.
        scheduled: number of samples that its schedules have counted.
        notes: lines on what is not as the command says.
    """

    def __init__(self, command: Command, data: RunData, start: Saved | None, numerics: Numerics = TRUTH) -> None:
        """Begin the run.

        Args:
            start: its weights and state; None: the initial values that megalite draws.
            numerics: in fp64, weights are rounded to the precision of the run before each forward, as it does.

        Raises:
            CheckpointError: `start` has another network, or cannot be read.
        """
        self.command, self.numerics = command, numerics
        config, self.notes = one_process(command, PRECISION_OF[numerics.dtype])
        if config.training.fp16 and config.training.loss_scale is None:
            config = replace(config, training=replace(config.training, loss_scale=_LOSS_SCALE))
        config = replace(
            config, model=replace(config.model, vocab_size=with_vocabulary(command, start).model.vocab_size)
        )
        self.task = GPTTask(config, data, ParallelMesh())
        self.trainer = make_trainer(config, self.task, self.task.mesh)
        self._dtype, self.depths = model_dtype(command.config), config.model.depths
        self.consumed = self.scheduled = 0
        if start is None:
            self._round()
        else:
            self._load(start)
        self.gradients: dict[str, Tensor] = {}
        """Gradients of the last step by logical name, before they are clipped, in the dtype of their sums."""

    def _load(self, start: Saved) -> None:
        """Set weights and state from a checkpoint."""
        self.trainer.load_model(start.precise)
        anew = self.command.settings.get("finetune", False)
        if not anew:
            self.consumed = self.scheduled = start.consumed_samples or 0
        averages = {name: source for name, source in start.states.items() if name != MASTER}
        if anew or not self.command.settings.get("load_optim", True) or not averages:
            return
        optimizer = self.trainer.optimizer
        with optimizer.settable_for_load():
            for region in held_regions(self.trainer.network, optimizer):
                part = region.part
                if not part.name.startswith(OPTIMIZER):
                    continue
                state, name = part.name.removeprefix(OPTIMIZER).split("/", 1)
                if state == MASTER:
                    continue
                if state not in averages:
                    raise CheckpointError(f"{start.what} has no {state}, which --optimizer keeps in this run")
                averages[state].fill(name, part.box, region.values.view(part.box.size))
        if start.updates is None:
            raise CheckpointError(f"{start.what} does not say how many updates its averages have had")
        optimizer.steps = start.updates

    def _round(self) -> list[tuple[Tensor, Tensor]]:
        """Round weights of fp64 to the precision of the run. Returns each with its values before."""
        kept = []
        for part in self.trainer.optimizer.slices() if self.numerics.dtype == torch.float64 else ():
            fp32 = part.parameter.sharding.pieces[0].tensor.fp32
            dtype = torch.promote_types(self._dtype, torch.float32) if fp32 else self._dtype
            kept.append((part.values, part.values.clone()))
            part.values.copy_(part.values.to(dtype))
        return kept

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Compute with the weights as the run rounds them."""
        kept = self._round()
        try:
            with self.numerics.applied():
                yield
        finally:
            for values, before in kept:
                values.copy_(before)

    # ------------------------------------------------------------------------------------------------ the samples

    @property
    def batch_size(self) -> int:
        """Number of samples of the next step."""
        return self.task.batch_size.at(self.consumed)

    def micro_batches(self, first: int | None = None) -> list[MicroBatch]:
        """Return the micro-batches of the next step, or of one of its size that begins at sample `first`.

        Raises DataError if the data have no such samples.
        """
        count = self.batch_size // self.trainer.config.training.micro_batch_size
        begin = self.consumed if first is None else first
        return list(self.trainer.loader.micro_batches(begin, equal_deal(0, 1, count)))

    def made(self, batches: Sequence[MicroBatchArrays]) -> list[MicroBatch]:
        """Return micro-batches of these samples."""
        trainer = self.trainer
        cutting = Cutting(depths=self.depths)
        return to_micro_batches(
            batches, trainer.config.training.seed, self.numerics.dtype, trainer.mesh.device, cutting
        )

    @torch.no_grad()
    def token_losses(self, micro_batches: Iterable[MicroBatch]) -> list[Tensor]:
        """Return the loss of each token of micro-batches, [batch, sequence] each, without weights of tokens."""
        found: list[Tensor] = []

        def keep(log_probabilities: Tensor, entropies: Tensor | None) -> dict[str, Tensor]:
            found.append(-log_probabilities)
            return {}

        with self.rounded():
            for each in micro_batches:
                self.trainer.chunks[0]({}, replace(each, token_loss=TokenLoss(keep), further=None))
        return found

    # ------------------------------------------------------------------------------------------------ a step

    @property
    def rates(self) -> Rates:
        """Rates of the next step."""
        return self.trainer.rates.at(self.scheduled)

    def step(self, micro_batches: Sequence[MicroBatch] | None = None, *, updates: bool = True) -> Step:
        """Run the next step.

        Args:
            micro_batches: its micro-batches; None: those of the data.
            updates: False for a step that the run has skipped, with its schedules in Megatron-LM.
        """
        trainer, size, scheduled = self.trainer, self.batch_size, self.scheduled
        plain = self.micro_batches() if micro_batches is None else micro_batches
        weighted = plain if self.command.per_token_loss else mean_of_means(plain, self.command.sizes["cp"])
        losses = self.token_losses(plain)
        with self.rounded():
            gradients = trainer.forward_backward(weighted, multipliers=self._multipliers(plain))
        norms: dict[str, float] = {}

        def keep(result: StepResult) -> StepResult:
            self.gradients = dict(self._complete_gradients(gradients.loss_scale))
            for name, gradient in self.gradients.items():
                norms[name] = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
            return replace(result, refused=not updates)

        result = trainer.optimizer.step(self.rates, gradients.loss_scale, keep)
        self.task.end_step(gradients.micro_batches, updated=not result.skipped)
        trainer.iteration += 1
        self.consumed += size
        if updates or self.command.program == "megalite":
            self.scheduled += size
        trainer.consumed_samples = self.consumed
        loss = float(gradients.sums[LM_LOSS.name]) / gradients.counts[LM_LOSS.name]
        if weighted is not plain:
            loss = mean_loss(losses, plain)
        terms = (each for each in gradients.terms if each.name != LM_LOSS.name and gradients.counts.get(each.name))
        others = sum(each.weight * float(gradients.sums[each.name]) / gradients.counts[each.name] for each in terms)
        norm = math.hypot(*norms.values())
        clip = clipping(trainer.config.optimizer, norm)
        return Step(loss, _of_tokens(losses, plain), norm, norms, others, scheduled, self.scheduled, clip)

    def _multipliers(self, micro_batches: Sequence[MicroBatch]) -> Callable[[Totals], Totals]:
        """Return the change of the terms' factors: Megatron-LM multiplies routers' by all tokens over those that count.

        So it does with --calculate-per-token-loss.
        """
        masks = [each.loss_mask for each in micro_batches if each.loss_mask is not None]
        counted = sum(float(mask.sum()) for mask in masks)
        if self.command.program != "megatron" or not self.command.per_token_loss or not counted:
            return dict
        factor = sum(mask.numel() for mask in masks) / counted
        return lambda found: {name: value * (factor if name in OF_ROUTERS else 1.0) for name, value in found.items()}

    def tried(self, micro_batches: Sequence[MicroBatch]) -> Step:
        """Return what the next step would give with other micro-batches, and update nothing."""
        before = self.consumed, self.scheduled, self.trainer.iteration
        found = self.step(micro_batches, updates=False)
        self.consumed, self.scheduled, self.trainer.iteration = before
        self.trainer.consumed_samples = self.consumed
        return found

    def states(self) -> dict[str, Tensor]:
        """Return what modules keep beside weights, such as the biases of routers, by the names of checkpoints."""
        return {
            f"{STATE}{piece.tensor.name}": piece.view(state.values).double().clone()
            for state in states_of(self.trainer.network)
            for piece in state.sharding.pieces
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by logical name."""
        for part in self.trainer.optimizer.slices():
            for piece in part.parameter.sharding.pieces:
                yield piece.tensor.name, piece.view(part.values.view(part.parameter.shape)).clone()

    def _complete_gradients(self, loss_scale: float) -> Iterator[tuple[str, Tensor]]:
        for bucket in self.trainer.optimizer.updated:
            for slot in bucket.slots:
                flat = bucket.gradient_shard[slot.start : slot.stop].view(slot.parameter.shape)
                for piece in slot.parameter.sharding.pieces:
                    yield piece.tensor.name, piece.view(flat) / loss_scale


def mean_loss(losses: Sequence[Tensor], micro_batches: Sequence[MicroBatch]) -> float:
    """Return the mean over all tokens that count of losses [batch, sequence] of micro-batches."""
    sums, counts = zip(*map(_sum_and_count, losses, micro_batches), strict=True)
    return sum(sums) / max(sum(counts), 1.0)


def mean_of_mean_losses(losses: Sequence[Tensor], micro_batches: Sequence[MicroBatch]) -> float:
    """Return the mean of the micro-batches' mean losses. The arguments are those of `mean_loss`."""
    means = [total / max(count, 1.0) for total, count in map(_sum_and_count, losses, micro_batches)]
    return sum(means) / len(means)


def _of_tokens(losses: Sequence[Tensor], micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Return the losses of the tokens that count, in the order of the samples."""
    order = torch.tensor([sample for each in micro_batches for sample in each.sample_ids]).argsort()
    masks = [each.loss_mask for each in micro_batches if each.loss_mask is not None]
    return torch.cat([*losses])[order][torch.cat(masks)[order] > 0].double()


def _sum_and_count(losses: Tensor, micro_batch: MicroBatch) -> tuple[float, float]:
    assert micro_batch.loss_mask is not None  # training data have one
    mask = micro_batch.loss_mask.double()
    return float((losses.double() * mask).sum()), float(mask.sum())


def mean_of_means(micro_batches: Sequence[MicroBatch], parts: int = 1) -> Sequence[MicroBatch]:
    """Return micro-batches weighted such that their mean over tokens is the mean of their own means.

    Megatron-LM differentiates this one without --calculate-per-token-loss. Each of the `parts` of a sample, for its
    context-parallel ranks, has a mean of its own. If all have as many tokens that count, the same list is returned.
    """
    masks = [each.loss_mask for each in micro_batches if each.loss_mask is not None]
    layouts = [SequenceLayout.cut(masks[0].shape[1], zigzag(parts), rank) for rank in range(parts)]
    places = [layout.places() for layout in layouts]
    counts = torch.stack([torch.stack([mask[:, own].sum(dtype=torch.float64) for own in places]) for mask in masks])
    if bool((counts == counts[0, 0]).all()):
        return micro_batches
    factors = counts.sum() / (counts.numel() * counts.clamp(min=1))
    found = []
    for each, mask, of_parts in zip(micro_batches, masks, factors, strict=True):
        weights = torch.empty(mask.shape[1], dtype=torch.float64)
        for own, factor in zip(places, of_parts, strict=True):
            weights[own] = factor
        found.append(replace(each, loss_mask=mask * weights.to(mask)))
    return found


def emulated(command: Command) -> tuple[Numerics, ...]:
    """Return ways to compute in the run's precision, in several orders."""
    dtype, tensor = model_dtype(command.config), command.sizes["tp"]
    return emulations(dtype, tensor, more=3)


def first_steps(run: OneProcess, updates: Sequence[bool], seed: int | None = None) -> list[Step]:
    """Run as many steps. `seed`: that of the order of the micro-batches, which adds their gradients in other orders."""
    found = []
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for each in updates:
        micro_batches = run.micro_batches()
        if generator is not None:
            order = torch.randperm(len(micro_batches), generator=generator).tolist()
            micro_batches = [micro_batches[at] for at in order]
        found.append(run.step(micro_batches, updates=each))
    return found


@dataclass(frozen=True)
class Copies:
    """Numbers of ranks that hold the same elements of a logical tensor: of one stage, and stages that hold it."""

    tensor_parallel: int
    stages: int
    is_expert: bool


def copies_of_tensors(config: RunConfig, world_size: int) -> dict[str, Copies]:
    """Return how often the layout of a run holds each logical tensor, by name.

    `config`: has its vocabulary size. The stages are built on the meta device.
    """
    size = config.parallel.pipeline_model_parallel_size
    stages, found = make_stages(config), dict[str, Copies]()
    for stage in range(size):
        mesh = ParallelMesh(world_size=world_size, **config.parallel.mesh_sizes, device=torch.device("meta"))
        mesh = mesh.at(stage * (world_size // size))
        peers = {*mesh.ranks("tp")}
        for chunk in make_chunks(config, config.model, mesh, stages):
            for parameter, piece in named_pieces(chunk):
                record, name = parameter.sharding, piece.tensor.name
                before = found.get(name)
                alike = len(peers.intersection(record.replica_ranks))
                found[name] = Copies(alike, 1 if before is None else before.stages + 1, record.expert)
    return found

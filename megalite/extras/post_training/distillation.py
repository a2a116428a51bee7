"""A teacher beside the network that is trained: the term of the loss that compares the predictions of both.

The teacher has the layout of the network. Before a step, it runs over the micro-batches, through the same pipeline, and
the last stage keeps its hidden states. Its logits are computed from them when the loss of a micro-batch is, and no rank
has those of more than one micro-batch, or of other columns than its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.config import ModelConfig, RunConfig
from megalite.config.distillation import DistillationConfig
from megalite.config.fields import with_defaults
from megalite.config.parallel import context_parallel_problems
from megalite.config.pipeline_layout import virtual_stages
from megalite.conversion.native import open_folder
from megalite.conversion.opened import OpenedModel
from megalite.data.tokenizers import Tokenizer
from megalite.errors import ConfigurationError
from megalite.extras.post_training.divergence import vocab_parallel_divergence
from megalite.extras.post_training.reference import load_teacher
from megalite.inference.network import check_layout
from megalite.model.batch import LogitLoss, MicroBatch
from megalite.model.gpt import GPT, HIDDEN_STATES, LOGITS
from megalite.model.head import LM_LOSS
from megalite.optim.optimizer import Optimizer
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.stage import LossTerm, StageOutput
from megalite.pipeline.engine import PipelineEngine, Stage
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.process.output import in_words
from megalite.storage import AnyPath, open_directory
from megalite.tasks.memory import storages_by_kind
from megalite.training.builder import count_parameters, model_dtype
from megalite.training.data import vocab_size

DISTILL_LOSS = "distill_loss"
TEACHER = "teacher"
"""Name of the section of a checkpoint."""


def distilled_terms(settings: DistillationConfig) -> tuple[LossTerm, ...]:
    """Return the terms of the loss of a run with a teacher: that of the labels, and the divergence."""
    weight = settings.distill_weight
    return replace(LM_LOSS, weight=1.0 - weight), LossTerm(DISTILL_LOSS, LM_LOSS.count, weight)


def check_teacher(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise MegaliteError if the teacher of a run is not there, or does not fit. It needs no other rank."""
    _open(config, vocab_size(tokenizer, config.model))


def _open(config: RunConfig, tokens: int) -> OpenedModel:
    """Open the teacher of a run, for a network with this number of tokens."""
    path, model = config.distillation.distill_from, config.model
    assert path is not None
    opened = open_folder(open_directory(path), model_dtype(config), depths=False).without_depths()
    flag = f"--distill-from {path}"
    if opened.config.vocab_size != tokens:
        raise ConfigurationError(
            f"{flag}: the teacher has {opened.config.vocab_size} tokens, and the network that is trained has "
            f"{tokens}: choose a teacher with the same vocabulary, or give that of the teacher to the network"
        )
    length, most = config.data.seq_length, opened.config.learned_positions
    if most and most < length:
        raise ConfigurationError(
            f"{flag}: the teacher has {most} positions, which are fewer than --seq-length {length}: shorten the samples"
        )
    if problems := "; ".join(_layout_problems(config, opened.config)):
        raise ConfigurationError(f"{flag}: the layout cannot divide the teacher: {problems}")
    # The columns of both networks are then on the same ranks.
    padding = model.make_vocab_size_divisible_by
    return replace(opened, config=replace(opened.config, make_vocab_size_divisible_by=padding))


def _layout_problems(config: RunConfig, teacher: ModelConfig) -> Iterator[str]:
    """Yield why the layout of a run cannot divide its teacher."""
    parallel, experts = config.parallel, teacher.num_experts or 0
    stages = parallel.pipeline_model_parallel_size * virtual_stages(config.model, parallel)
    try:
        check_layout(teacher, parallel.tensor_model_parallel_size, stages)
    except ConfigurationError as error:
        yield from str(error).splitlines()
    if parallel.context_parallel_size > 1:
        # A teacher without layers that pass a state on has no use for the exchange of states, and that is no fault.
        divided = with_defaults(parallel, ["cp_state_exchange"])
        yield from context_parallel_problems(divided, teacher, config.data.seq_length)
    if experts % parallel.expert_model_parallel_size:
        ranks = parallel.expert_model_parallel_size
        yield f"its {experts} experts are not divisible by --expert-model-parallel-size {ranks}"


class Teacher:
    """Larger network without gradients, with whose predictions those of the network that is trained are compared."""

    def __init__(
        self,
        config: RunConfig,
        chunks: Sequence[GPT],
        engine: PipelineEngine[MicroBatch],
        optimizer: Optimizer,
        schedules: ProvedSchedules,
    ) -> None:
        """Load the teacher of a run onto the ranks of the network. All ranks make it together.

        Raises ConfigurationError as `check_teacher` does, and CheckpointError if the teacher cannot be read.
        """
        self._mesh, self._schedules, self._config = chunks[0].mesh, schedules, config
        if not self._mesh.is_connected:
            raise ConfigurationError("--distill-from: runs of a single rank do not know of a teacher: leave it out")
        with raise_on_all_ranks(self._mesh, f"opening --distill-from {config.distillation.distill_from}"):
            opened = _open(config, chunks[0].vocab_size)
        self.frozen = load_teacher(opened, chunks, engine, optimizer, output_apart=True)
        own = self.frozen.engine
        last = [stage == own.stages.count - 1 for stage in own.stages.of_rank(own.rank)]
        pairs = zip(self.frozen.chunks, last, strict=True)
        runs = [self._keep(chunk) if is_last else chunk for chunk, is_last in pairs]
        self._engine = PipelineEngine(runs, own.stages, own.rank, own.links, own.device)
        self._hidden: list[Tensor] = []
        self.notes, self._what = opened.notes, opened.what

    def _keep(self, chunk: GPT) -> Stage[MicroBatch]:
        """Return the last stage, whose hidden states are kept."""

        def run(inputs: Mapping[str, Tensor], micro_batch: MicroBatch) -> StageOutput:
            self._hidden.append(chunk(inputs, micro_batch).tensors[HIDDEN_STATES])
            return StageOutput({})

        return run

    def compared(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Run over the micro-batches of a step. Returns them with the term of the loss, which the last stage computes.

        Called by all ranks together.
        """
        count = len(micro_batches)
        plain = [
            replace(each, labels=None, loss_mask=None, replayed=None, choices=None, sources=None)
            for each in micro_batches
        ]
        self._hidden = []
        self._engine.run(self._schedules.prove(evaluation=[count], mesh=self._mesh).evaluation(count), plain)
        hidden, self._hidden = self._hidden, []
        if not self.frozen.output:
            return micro_batches
        return [
            replace(each, logit_loss=LogitLoss(DISTILL_LOSS, partial(self._divergences, states, without)))
            for each, states, without in zip(micro_batches, hidden, plain, strict=True)
        ]

    def _divergences(self, hidden: Tensor, micro_batch: MicroBatch, logits: Tensor, cap: float | None) -> Tensor:
        """Return the divergence of each token, [sequence, batch], given this rank's columns of the logits."""
        (output,), settings = self.frozen.output, self._config.distillation
        with torch.no_grad():
            own = output({HIDDEN_STATES: hidden}, micro_batch).tensors[LOGITS]
        return vocab_parallel_divergence(
            logits,
            own,
            output.context.group("vocabulary"),
            output.vocab_size,
            temperature=settings.distill_temperature,
            top_k=settings.distill_top_k,
            cap=cap,
        )

    def saved(self) -> dict[str, Any]:
        """Return the section of a checkpoint that says which teacher the run has."""
        return {TEACHER: {"weights": self._what}}

    def change_notes(self, path: AnyPath, saved: Mapping[str, Any]) -> tuple[str, ...]:
        """Return a note if a checkpoint, with this configuration, is of a run with another teacher, or with none."""
        before = saved.get(TEACHER, {}).get("weights")
        if before == self._what:
            return ()
        return (f"note: the teacher is now {self._what}; until {path} it was {before or 'none'}",)

    def summary(self, micro_batches: int) -> tuple[str, int]:
        """Return a line about the teacher, and the bytes that it takes on this rank. Called by all ranks together.

        Counted are its weights and, on the last stage, the hidden states of a step of so many micro-batches, and twice
        the logits of one: the teacher's, and the gradient of the divergence. Its activations are freed layer by layer.
        """
        run, frozen = self._config, self.frozen
        config, item, output = frozen.config, frozen.dtype.itemsize, 0
        weights = sum(storages_by_kind(frozen.optimizer)["parameters"].values())
        if frozen.output:
            tokens = run.training.micro_batch_size * run.data.seq_length
            columns = config.padded_vocab_size(self._mesh.size("tp")) // self._mesh.size("tp")
            output = micro_batches * tokens // run.parallel.sequence_parts * config.hidden_size * item
            output += 2 * tokens // self._mesh.size("cp") * columns * item
        whose = "a rank" if self._mesh.size("pp") == 1 else "on rank 0"
        parameters = count_parameters([*frozen.chunks, *frozen.output], self._mesh)
        line = f"{parameters:,} parameters: {config.num_layers} layers, hidden {config.hidden_size}; "
        line += f"{in_words(weights + output)} {whose}, of which {in_words(weights)} are weights"
        return line, weights + output

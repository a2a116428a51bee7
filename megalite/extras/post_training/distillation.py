"""A teacher beside the network that is trained: the term of the loss that compares the predictions of both.

Before a step, the teacher runs over the micro-batches, and the last stage of the trained network gets its hidden
states. Its logits are computed from them when the loss of a micro-batch is, and no rank has those of more than one
micro-batch, or of other columns than its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.config import ModelConfig, ParallelConfig, RunConfig
from megalite.config.distillation import DistillationConfig
from megalite.config.fields import with_defaults
from megalite.config.parallel import context_parallel_problems
from megalite.config.pipeline_layout import virtual_stages
from megalite.conversion.native import open_folder
from megalite.conversion.opened import OpenedModel
from megalite.data.tokenizers import Tokenizer
from megalite.errors import ConfigurationError
from megalite.extras.post_training.divergence import vocab_parallel_divergence
from megalite.extras.post_training.teacher_network import DividedAsTheNetwork, DividedOtherwise, TeacherNetwork
from megalite.inference.network import check_layout
from megalite.model.batch import LogitLoss, MicroBatch
from megalite.model.gpt import GPT, HIDDEN_STATES, LOGITS
from megalite.model.head import LM_LOSS
from megalite.optim.optimizer import Optimizer
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.stage import LossTerm
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.process.output import in_words
from megalite.storage import AnyPath, open_directory
from megalite.tasks.memory import storages_by_kind
from megalite.training.builder import model_dtype
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
    layout = config.distillation.teacher_layout
    given = flag if layout is None else f"--distill-layout {' '.join(config.distillation.distill_layout)}"
    if problems := "; ".join(_layout_problems(config, layout, opened.config)):
        raise ConfigurationError(f"{given}: the layout cannot divide the teacher: {problems}")
    # The columns of both networks are then on the same ranks.
    padding = model.make_vocab_size_divisible_by
    return replace(opened, config=replace(opened.config, make_vocab_size_divisible_by=padding))


def _layout_problems(config: RunConfig, own: ParallelConfig | None, teacher: ModelConfig) -> Iterator[str]:
    """Yield why a layout of its own, or that of the run, cannot divide the teacher."""
    parallel, experts = own or config.parallel, teacher.num_experts or 0
    chunks = 1 if own is not None else virtual_stages(config.model, parallel)
    stages = parallel.pipeline_model_parallel_size * chunks
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
    shared = parallel.expert_tensor_parallel_size or 1
    tensor, sizes = parallel.tensor_model_parallel_size, parallel.mesh_sizes
    split = sizes["expert_parallel_size"], sizes["expert_tensor_parallel_size"]
    if experts and not parallel.sequence_parallel and tensor > 1 and split != (1, tensor):
        yield f"tensor-parallel ranks, {tensor}, that divide its experts otherwise need sequence-parallel"
    if experts and (width := teacher.expert_ffn_size) % shared:
        yield f"the width of its experts, {width}, is not divisible by --expert-tensor-parallel-size {shared}"


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
        self._mesh, self._config, self._item = chunks[0].mesh, config, chunks[0].dtype.itemsize
        if not self._mesh.is_connected:
            raise ConfigurationError("--distill-from: runs of a single rank do not know of a teacher: leave it out")
        with raise_on_all_ranks(self._mesh, f"opening --distill-from {config.distillation.distill_from}"):
            opened = _open(config, chunks[0].vocab_size)
        layout = config.distillation.teacher_layout
        self.network: TeacherNetwork
        if layout is None:
            self.network = DividedAsTheNetwork(opened, chunks, engine, optimizer, schedules)
        else:
            samples = config.training.micro_batch_size, config.data.seq_length
            self.network = DividedOtherwise(layout, samples, opened, chunks, engine, optimizer)
        self.notes, self._what = opened.notes, opened.what

    def compared(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Run over the micro-batches of a step. Returns them with the term of the loss, which the last stage computes.

        Called by all ranks together.
        """
        plain = [
            replace(each, labels=None, loss_mask=None, replayed=None, choices=None, sources=None)
            for each in micro_batches
        ]
        hidden = self.network.hidden_states(plain)
        if not self.network.output:
            return micro_batches
        return [
            replace(each, logit_loss=LogitLoss(DISTILL_LOSS, partial(self._divergences, states, without)))
            for each, states, without in zip(micro_batches, hidden, plain, strict=True)
        ]

    def _divergences(self, hidden: Tensor, micro_batch: MicroBatch, logits: Tensor, cap: float | None) -> Tensor:
        """Return the divergence of each token, [sequence, batch], given this rank's columns of the logits."""
        (output,), settings = self.network.output, self._config.distillation
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
        run, config, item, output = self._config, self.network.config, self._item, 0
        held = [storages_by_kind(each)["parameters"] for each in self.network.optimizers]
        weights = sum(size for storages in held for size in storages.values())
        if self.network.output:
            tokens = run.training.micro_batch_size * run.data.seq_length
            columns = config.padded_vocab_size(self._mesh.size("tp")) // self._mesh.size("tp")
            output = micro_batches * tokens // run.parallel.sequence_parts * config.hidden_size * item
            output += 2 * tokens // self._mesh.size("cp") * columns * item
        own = run.distillation.teacher_layout or run.parallel
        is_split = max(self._mesh.size("pp"), own.pipeline_model_parallel_size) > 1
        whose = "on rank 0" if is_split else "a rank"
        line = f"{self.network.parameters():,} parameters: {config.num_layers} layers, hidden {config.hidden_size}; "
        line += f"{in_words(weights + output)} {whose}, of which {in_words(weights)} are weights"
        return line, weights + output

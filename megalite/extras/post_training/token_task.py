"""The task of a run that trains a GPT on samples of one's own, with the language-model loss or a loss of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from megalite.config import RunConfig
from megalite.data.any_dataset import Batch
from megalite.data.sample_source import SampleSource
from megalite.errors import ConfigurationError, DataError
from megalite.extras.post_training.log_probabilities import LOSS, LossFunction, with_loss
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.model.head import LM_LOSS
from megalite.modules.sequences import layout_of
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.stage import LossTerm
from megalite.pipeline.stages import Stages
from megalite.tasks import summary
from megalite.tasks.adapters import check_names
from megalite.tasks.dataset_task import DatasetTask
from megalite.tasks.gpt_network import GPTNetworkTask
from megalite.tasks.loss_functions import Count, counted_terms
from megalite.training import builder
from megalite.training.builder import count_parameters
from megalite.training.task import Summarized


@dataclass(frozen=True)
class TokenBatch(MicroBatch):
    """Micro-batch with all fields of its samples, which a loss of one's own gets."""

    fields: Mapping[str, Any] | None = None

    @property
    def values(self) -> Mapping[str, Any]:
        return self.fields or {}


class TokenTask(GPTNetworkTask, DatasetTask):
    """Training of a GPT on samples of one's own, on this rank. Create it on all ranks together.

    A sample has the field `tokens` [sequence], and may have `labels` (by default the next tokens), `loss_mask`,
    `positions`, and fields for the loss.
    """

    config: RunConfig

    def __init__(
        self,
        config: RunConfig,
        mesh: ParallelMesh,
        train: SampleSource | None,
        valid: SampleSource | None = None,
        *,
        loss: LossFunction | None = None,
        count: Count | None = None,
    ) -> None:
        super().__init__(config, mesh, train, valid)
        if loss is not None and mesh.size("cp") > 1:
            raise ConfigurationError(
                f"Layout(cp={mesh.size('cp')}) cuts samples, and a loss of one's own for a GPT needs whole ones: "
                "leave out cp, or loss"
            )
        if config.model.depths:
            raise ConfigurationError(
                f"mtp_num_layers={config.model.depths}: a GPT on samples of one's own predicts the next token alone. "
                "Leave it out (with finetune=True, which leaves the depths of a checkpoint out)"
            )
        self.model, self.chunks = config.model, []
        check_names(config.model, config.adapters)
        self.hidden_size, self.tokens_per_sample = config.model.hidden_size, config.data.seq_length
        self._loss = loss
        self._terms: tuple[LossTerm, ...] = (LM_LOSS,)
        if loss is not None:
            self._terms = self.terms_of(count, None if count is None else self.first_micro_batch())
        self.loss_name, self.evaluated = self._terms[0].name, self._terms

    def stages_for(self, micro_batch: TokenBatch) -> Stages:
        training = replace(self.config.training, micro_batch_size=len(micro_batch.sample_ids))
        return builder.make_stages(replace(self.config, training=training))

    def make_chunks(self, mesh: ParallelMesh, stages: Stages) -> list[GPT]:
        chunks = super().make_chunks(mesh, stages)
        for chunk in chunks:
            chunk.main_terms = self._terms
        return chunks

    @staticmethod
    def terms_of(count: Count | None, example: TokenBatch | None) -> tuple[LossTerm, ...]:
        """Return the terms of a loss of one's own: counted by the function or, without one, by the loss mask."""
        return (LossTerm(LOSS, LM_LOSS.count),) if count is None else counted_terms(count, example)

    # ------------------------------------------------------------------------------------------------ the data

    def to_micro_batch(self, batch: Batch) -> MicroBatch:
        return self.micro_batch(batch.values, batch.sample_ids)

    def micro_batch(self, values: Any, sample_ids: Sequence[int]) -> TokenBatch:
        """Return a micro-batch from the fields of its samples, with its loss. Raises DataError."""
        if not isinstance(values, Mapping) or "tokens" not in values:
            raise DataError(
                f"a batch for a GPT is {type(values).__name__}: samples must be mappings with the field tokens"
            )
        fields = self.on_device(values)
        tokens = fields["tokens"]
        length = self.config.data.seq_length
        if tokens.dim() != 2 or tokens.shape[1] != length or tokens.dtype != torch.int64:
            raise DataError(
                f"the tokens of a batch are {tuple(tokens.shape)} of {tokens.dtype}: they must be int64 [batch, "
                f"{length}], which is seq_length"
            )
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < (self.model.vocab_size or 0):
            raise DataError(
                f"a batch has tokens from {int(tokens.min())} to {int(tokens.max())}, and vocab_size is "
                f"{self.model.vocab_size}"
            )
        labels, mask = fields.get("labels"), fields.get("loss_mask")
        if labels is None:
            labels = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)
            if mask is None:
                mask = torch.ones_like(tokens, dtype=torch.float32)
                mask[:, -1] = 0.0  # the last token has no next one
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.float32)
        positions = fields.get("positions")
        if positions is None:
            positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        layout = layout_of(self.mesh, length)
        found = TokenBatch(
            tokens=layout.own(tokens),
            positions=layout.own(positions),
            first_keys=None,
            labels=layout.own(labels),
            loss_mask=layout.own(mask).to(torch.promote_types(self.dtype, torch.float32)),
            key=RandomKey(self.config.training.seed, tuple(sample_ids)),
            layout=layout,
            fields={**fields, "labels": labels, "loss_mask": mask},
        )
        if self._loss is None:
            return found
        (with_own,) = with_loss([found], self._loss, [found.values], terms=[term.name for term in self._terms])
        assert isinstance(with_own, TokenBatch)
        return with_own

    # ------------------------------------------------------------------------------------------------ checkpoints

    def saved_config(self, consumed_samples: int) -> dict[str, Any]:
        own = {"model": asdict(self.model), "data": asdict(self.config.data)}
        return {**super().saved_config(consumed_samples), **own}

    def model_section(self) -> dict[str, Any]:
        return asdict(self.model)

    # ------------------------------------------------------------------------------------------------ reports

    def summary(self, trainer: Summarized) -> Mapping[str, object]:
        count = self.config.training.micro_batch_size
        length = self.config.data.seq_length
        tokens = (torch.arange(count * length) % (self.model.vocab_size or 1)).view(count, length)
        batch = replace(self.micro_batch({"tokens": tokens}, range(count)), token_loss=None)
        model = f"{count_parameters(trainer.chunks, self.mesh):,} parameters: {self.model.num_layers} layers, hidden"
        lines = {"model": f"{model} {self.model.hidden_size}", **self.lines(trainer, batch)}
        return {**lines, "precision": summary.precision_line(self.config)}

    def notes(self, trainer: Summarized) -> tuple[str, ...]:
        return (*super().notes(trainer), *self.recipe_notes)

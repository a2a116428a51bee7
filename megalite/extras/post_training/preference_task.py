"""The task of a run that trains a GPT on pairs of responses, against a reference that stays as it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megalite.config import RunConfig
from megalite.data.blend import Dataset
from megalite.data.fields import SampleFields
from megalite.data.loader import MicroBatchArrays
from megalite.data.sampler import equal_deal
from megalite.data.sources import Sources
from megalite.errors import ConfigurationError
from megalite.extras.post_training.preferences import (
    PairBatch,
    loss_name,
    of_responses,
    pair_batch,
    preference_sums,
    preference_terms,
)
from megalite.extras.post_training.reference import FrozenNetwork, load_teacher
from megalite.extras.post_training.reference_file import ReferenceFile, identity
from megalite.lifecycle.control_files import has_file
from megalite.model.batch import MicroBatch, TokenLoss
from megalite.model.gpt import GPT
from megalite.parallel import collectives
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.device import moved
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import TermSums
from megalite.pipeline.stages import Stages
from megalite.process.output import in_words
from megalite.storage import open_directory
from megalite.tasks.gpt_task import GPTTask, TokenLoader
from megalite.tasks.memory import storages_by_kind
from megalite.training.data import RunData
from megalite.training.resume import open_initial_model
from megalite.training.task import Summarized
from megalite.watchdog.sections import START

_SCORING = "scoring of pairs"
"""Name of the section of a batch of the reference."""
_KEPT_SECONDS = 300.0
"""Seconds after which the log-probabilities that are there are kept."""


class PreferenceTask(GPTTask):
    """Training of a GPT on pairs of responses on this rank. Create it on all ranks together."""

    has_perplexity = False

    def __init__(self, config: RunConfig, data: RunData, mesh: ParallelMesh) -> None:
        super().__init__(config, data, mesh)
        self.options = config.preferences
        self._terms = preference_terms(self.options)
        self.loss_name, self.evaluated = loss_name(self.options), self._terms
        self._trainer: Summarized | None = None
        self._reference: FrozenNetwork | None = None
        self._reference_notes: tuple[str, ...] = ()
        self._known: np.ndarray | None = None

    def make_chunks(self, mesh: ParallelMesh, stages: Stages) -> list[GPT]:
        chunks = super().make_chunks(mesh, stages)
        for chunk in chunks:
            chunk.main_terms = self._terms
        return chunks

    # ------------------------------------------------------------------------------------------------ the reference

    def begin(self, trainer: Summarized) -> None:
        """Make the reference, or read its log-probabilities, which are computed first if they are not there.

        If both are given, the reference is loaded once, to tell whether it is that of the file.
        """
        self._trainer = trainer
        with trainer.sections(START):
            if self.options.reference_model is not None:
                self._reference = self._load_reference(trainer)
            if self.options.reference_log_probabilities is None:
                return
            file = ReferenceFile(self.config, self.data.tokenizer)
            known = None if self._reference is None else identity(self._reference, self.mesh)
            values, scored = file.read(known, self.mesh)
        if known is not None and scored is not None:
            values = self._of_all(trainer, file, known, values, scored)
        self._known, self._reference = values, None

    def _load_reference(self, trainer: Summarized) -> FrozenNetwork:
        """Return the network of --reference-model. Raises CheckpointError if it is no model or cannot be read."""
        path = self.options.reference_model
        assert path is not None
        with raise_on_all_ranks(self.mesh, None):
            folder = open_directory(path)
            if not any(has_file(folder / name) for name in ("manifest.json", "config.json")):
                raise ConfigurationError(
                    f"--reference-model {path} is no model: give one checkpoint, as in RUN/iter_0001000, or a Hugging "
                    "Face folder"
                )
            opened = open_initial_model(folder)
        self._reference_notes = opened.notes
        return load_teacher(opened, self.chunks, trainer.engine, trainer.optimizer)

    def _of_all(
        self, trainer: Summarized, file: ReferenceFile, known: str, values: np.ndarray, scored: int
    ) -> np.ndarray:
        """Return the reference's log-probabilities of all responses that are trained on, by their number.

        They are in the file at the end, and those that are there on the way. `values`: those of the first `scored`
        samples, and zeros. `known`: the identity of the reference.
        """
        own = torch.zeros(file.count, dtype=torch.float64)
        ranks, before, kept = self.mesh.size("dp"), 0, time.monotonic()
        deal, step = equal_deal(self.mesh.coordinate("dp"), ranks, ranks), ranks * self.config.training.micro_batch_size

        def keep(scored: int | None) -> np.ndarray:
            with trainer.sections(START):
                of_ranks = own.to(self.mesh.device, copy=True)  # others' are 0, which changes no bit
                every = values + collectives.all_reduce_(of_ranks, self.mesh.group("dp")).cpu().numpy()
                file.write(every, known, self.mesh, scored=scored)
            return every

        with trainer.sections(START), raise_on_all_ranks(self.mesh, None):
            datasets = [pairs.dataset(range(len(pairs.pairs)), None) for pairs in file.files.values()]
        for dataset in datasets:
            with self._loader(dataset, None, whole=True) as loader:
                for first in range(max(scored - before, 0), len(dataset), step):
                    with trainer.sections(_SCORING):
                        (batch,) = loader.micro_batches(first, deal)
                        assert isinstance(batch, PairBatch)
                        assert batch.reference is not None
                        own[torch.from_numpy(batch.responses)] = batch.reference.cpu()
                        # The ranks wait for each other: at the end, a slow one would be late by more than a batch.
                        (due,) = collectives.on_any_rank([time.monotonic() - kept > _KEPT_SECONDS], self.mesh)
                    if due:
                        keep(before + min(first + step, len(dataset)))
                        kept = time.monotonic()
            before += len(dataset)
        return keep(None)

    def _score(self, batches: Sequence[PairBatch]) -> list[Tensor]:
        """Return the reference's log-probabilities of the responses of each micro-batch, [r]."""
        if self._known is not None:
            return [moved(torch.from_numpy(self._known[each.responses]), self.mesh.device) for each in batches]
        assert self._trainer is not None
        assert self._reference is not None
        count = len(batches)
        actions = self._trainer.schedules.prove(evaluation=[count], mesh=self.mesh).evaluation(count)
        outputs = self._reference.log_probabilities(actions, batches, parts=True)
        return [self._of_responses(each.log_probabilities, own) for each, own in zip(outputs, batches, strict=True)]

    def summary(self, trainer: Summarized) -> dict[str, object]:
        lines = super().summary(trainer)
        if self._reference is None:
            return {**lines, "reference": f"log-probabilities from {self.options.reference_log_probabilities}"}
        size = sum(storages_by_kind(self._reference.optimizer)["parameters"].values())
        assert self.counted_memory is not None
        self.counted_memory += size
        return {**lines, "reference": f"{self.options.reference_model}, {in_words(size)} more a rank"}

    def notes(self, trainer: Summarized) -> tuple[str, ...]:
        return (*super().notes(trainer), *self._reference_notes)

    # ------------------------------------------------------------------------------------------------ the data

    def _loader(
        self, dataset: Dataset[SampleFields], sources: Sources | None, *, trains: bool = False, whole: bool = False
    ) -> TokenLoader:
        loader = super()._loader(dataset, sources, trains=trains, whole=whole)
        return replace(loader, cut=partial(self._with_pairs, loader.cut), terms=())

    def _with_pairs(
        self, cut: Callable[[Iterable[MicroBatchArrays]], list[MicroBatch]], arrays: Iterable[MicroBatchArrays]
    ) -> list[MicroBatch]:
        """Return micro-batches with the loss of their pairs. `cut`: function that makes them from whole samples."""
        whole = list(arrays)
        batches = [pair_batch(batch, fields) for batch, fields in zip(cut(whole), whole, strict=True)]
        scored = [replace(batch, reference=found) for batch, found in zip(batches, self._score(batches), strict=True)]
        return [replace(batch, token_loss=TokenLoss(partial(self._sums, batch))) for batch in scored]

    def _of_responses(self, log_probabilities: Tensor, batch: PairBatch) -> Tensor:
        return of_responses(log_probabilities, batch, self.mesh.group("cp"))

    def _sums(self, batch: PairBatch, log_probabilities: Tensor, entropies: Tensor | None) -> TermSums:
        return preference_sums(self.options, batch, self._of_responses(log_probabilities, batch))

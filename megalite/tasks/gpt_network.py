"""Part that tasks with a GPT share: its stages, their initial values, and what a checkpoint must fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megalite import checkpoint
from megalite.checkpoint import Manifest
from megalite.config import ModelConfig, RunConfig
from megalite.config.prediction import without_depths
from megalite.conversion.opened import OpenedModel, in_checkpoint, states_of_training, tensors_of_depths
from megalite.errors import CheckpointError
from megalite.model.gpt import GPT
from megalite.model.offloading import offload_layers
from megalite.parallel.initialization import set_initial_values
from megalite.parallel.largest_logits import largest_of_all
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.pipeline.stages import Stages
from megalite.storage import AnyPath
from megalite.training import builder
from megalite.training.batches import Cutting
from megalite.training.kernels import compile_layers
from megalite.training.metrics import LARGEST_LOGIT
from megalite.training.resume import open_initial_model
from megalite.training.task import Task


class GPTNetworkTask(Task):
    """Task whose network is a GPT."""

    config: RunConfig
    mesh: ParallelMesh
    model: ModelConfig
    """The network, with the size of its vocabulary."""
    dtype: torch.dtype
    chunks: list[GPT]
    """This rank's stages; empty before they are made."""
    cutting: Cutting = Cutting()
    """Division of samples among context-parallel ranks."""
    depth_notes: tuple[str, ...] = ()
    """Notes on depths that a checkpoint has and this run lacks, or the reverse."""

    def stages(self) -> Stages:
        return builder.make_stages(self.config)

    def make_chunks(self, mesh: ParallelMesh, stages: Stages) -> list[GPT]:
        chunks = builder.make_chunks(self.config, self.model, mesh, stages)
        if not self.chunks:  # the first ones are this rank's
            self.chunks = chunks
            if self.config.kernels.compile:
                compile_layers(chunks)
            if self.config.offload.offloads_activations:
                self.offloading = offload_layers(chunks, self.config.offload)
        return chunks

    @property
    def set_values(self) -> Callable[[Parameter], None]:
        return partial(set_initial_values, seed=self.config.training.seed)

    def figures(self, micro_batches: Sequence[Any], *, updated: bool) -> dict[str, float]:
        return {LARGEST_LOGIT: largest_of_all(self.chunks, self.mesh)} if self.model.measures_logits else {}

    def check_compatible(self, path: AnyPath, described: Manifest) -> None:
        saved = checkpoint.model_config(path, described.config, self.model)
        self._check_function(str(path), saved)

    def optional_tensors(self, path: AnyPath, described: Manifest) -> set[str]:
        """Return the names of the state that only training needs, here or in the run that saved the checkpoint.

        With --finetune, also those of the depths, if the two runs have different ones.
        """
        saved = checkpoint.model_config(path, described.config, self.model)
        models = [model for model in (self.model, saved) if model.num_experts is not None]
        found = {name for model in models for name in states_of_training(model)}
        return found.union(*map(in_checkpoint, self._replaced_depths(saved)))

    def _replaced_depths(self, saved: ModelConfig) -> list[set[str]]:
        """Return the names of the tensors of the depths, those of this run first; none if the two have the same."""
        if checkpoint.same_depths(saved, self.model):
            return []
        return [tensors_of_depths(model) for model in (self.model, saved)]

    def _check_function(self, what: str, saved: ModelConfig) -> None:
        """Raise CheckpointError if a network computes another function. With --finetune, its depths may differ."""
        loading, model = self.config.checkpoint, self.model
        if loading.finetune and not checkpoint.same_depths(saved, model):
            if loading.load_casts and model.depths:
                raise CheckpointError(
                    f"{what} does not have the depths of --mtp-num-layers {model.depths}: this run begins them anew, "
                    "which --load-casts cannot: leave it out"
                )
            fates = {"leaves out its depths ({})": saved.depths, "begins those of this run anew ({})": model.depths}
            said = " and ".join(words.format(count) for words, count in fates.items() if count)
            self.depth_notes = (f"note: {what} has other depths of multi-token prediction: --finetune {said}",)
            saved, model = without_depths(saved), without_depths(model)
        checkpoint.check_same_function(what, saved, model)

    def open_weights(self, path: AnyPath) -> OpenedModel:
        opened = open_initial_model(path)
        if self.config.checkpoint.resize_vocabulary:
            from megalite.conversion.vocabulary import with_more_tokens

            opened = with_more_tokens(opened, self.model.vocab_size)
        if self.config.checkpoint.moe_use_upcycling:
            from megalite.conversion.upcycling import upcycled

            opened = upcycled(opened, self.model, self.config.training.seed)
        return opened

    def check_weights(self, opened: OpenedModel) -> set[str]:
        self._check_function(opened.what, opened.config)
        return states_of_training(self.model).union(*self._replaced_depths(opened.config)[:1])

"""Part that tasks with a GPT share: its stages, their initial values, and what a checkpoint must fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from megalite import checkpoint
from megalite.checkpoint import Manifest
from megalite.config import ModelConfig, RunConfig
from megalite.conversion.opened import OpenedModel, states_of_training
from megalite.model.gpt import GPT
from megalite.model.offloading import offload_layers
from megalite.parallel.initialization import set_initial_values
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.pipeline.stages import Stages
from megalite.storage import AnyPath
from megalite.training import builder
from megalite.training.batches import Cutting
from megalite.training.kernels import compile_layers
from megalite.training.resume import open_initial_model
from megalite.training.task import Task


class GPTNetworkTask(Task):
    """Task whose network is a GPT."""

    config: RunConfig
    model: ModelConfig
    """The network, with the size of its vocabulary."""
    dtype: torch.dtype
    chunks: list[GPT]
    """This rank's stages; empty before they are made."""
    cutting: Cutting = Cutting()
    """Division of samples among context-parallel ranks."""

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

    def check_compatible(self, path: AnyPath, described: Manifest) -> None:
        checkpoint.check_compatible(path, described.config, self.model)

    def optional_tensors(self, path: AnyPath, described: Manifest) -> set[str]:
        """Return the names of the state that only training needs, here or in the run that saved the checkpoint."""
        saved = checkpoint.model_config(path, described.config, self.model)
        models = [model for model in (self.model, saved) if model.num_experts is not None]
        return {name for model in models for name in states_of_training(model)}

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
        checkpoint.check_same_function(opened.what, opened.config, self.model)
        return states_of_training(self.model)

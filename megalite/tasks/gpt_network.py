"""Part that tasks with a GPT share: its stages, their initial values, and what a checkpoint must fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megalite import checkpoint
from megalite.checkpoint import Manifest
from megalite.checkpoint.manifest import MODEL
from megalite.config import ModelConfig, RunConfig
from megalite.config.kinds.sparse_attention import without_indexers
from megalite.config.prediction import without_depths
from megalite.conversion.opened import (
    OpenedModel,
    in_checkpoint,
    states_of_training,
    tensors_of_depths,
    tensors_of_indexers,
)
from megalite.errors import CheckpointError
from megalite.model.gpt import GPT
from megalite.model.offloading import offload_layers
from megalite.optim.optimizer import Optimizer
from megalite.parallel.initialization import set_initial_values
from megalite.parallel.largest_logits import largest_of_all
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter, named_pieces
from megalite.parallel.rounded_products import kept_codes
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.pipeline.stages import Stages
from megalite.storage import AnyPath
from megalite.tasks.adapters import base_of, check_adapters, check_same_adapters, check_same_trained, start_of_adapters
from megalite.training import builder
from megalite.training.batches import Cutting
from megalite.training.kernels import compile_layers, require_recipe, require_whole_units
from megalite.training.metrics import LARGEST_LOGIT
from megalite.training.resume import ResumePoint, open_initial_model
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
    network_notes: tuple[str, ...] = ()
    """Notes on differences between the network and that of a checkpoint: rotary embeddings, depths, indexers."""

    def stages(self) -> Stages:
        return builder.make_stages(self.config)

    def make_chunks(self, mesh: ParallelMesh, stages: Stages) -> list[GPT]:
        chunks = builder.make_chunks(self.config, self.model, mesh, stages)
        if not self.chunks:  # the first ones are this rank's
            self.chunks = chunks
            require_recipe(self.config, mesh.device)
            require_whole_units(self.config, chunks, mesh.device)
            if self.config.kernels.compile:
                compile_layers(chunks)
            if self.config.offload.offloads_activations:
                self.offloading = offload_layers(chunks, self.config.offload)
        return chunks

    def connect(self, engine: PipelineEngine[Any], optimizer: Optimizer, schedules: ProvedSchedules) -> None:
        if self.config.low_precision.recipe is not None:
            engine.within = partial(kept_codes, self.chunks)

    @property
    def recipe_notes(self) -> tuple[str, ...]:
        """Notes on products in few bits."""
        if self.config.low_precision.recipe is None:
            return ()
        from megalite.config.validate_low_precision import low_precision_notes  # few runs have them

        return low_precision_notes(self.config)

    @property
    def set_values(self) -> Callable[[Parameter], None]:
        return partial(set_initial_values, seed=self.config.training.seed)

    def figures(self, micro_batches: Sequence[Any], *, updated: bool) -> dict[str, float]:
        return {LARGEST_LOGIT: largest_of_all(self.chunks, self.mesh)} if self.model.measures_logits else {}

    @property
    def saves_frozen(self) -> bool:  # type: ignore[override]
        return self.config.adapters.lora_rank is None

    def start(self, found: ResumePoint) -> ResumePoint:
        return found if self.saves_frozen else start_of_adapters(found, self.config.checkpoint, self.mesh)

    def open_base(self, path: AnyPath, described: Manifest) -> OpenedModel | None:
        return None if self.saves_frozen else base_of(path, described.config, self.config.checkpoint)

    def check_compatible(self, path: AnyPath, described: Manifest) -> None:
        saved = checkpoint.model_config(path, described.config, self.model)
        self._check_function(str(path), saved)
        check_adapters(path, described.config, self.config.adapters, self.model)

    def check_trained(self, path: AnyPath, described: Manifest) -> None:
        """Raise CheckpointError if the run trained other weights, as a stage of sparse attention, or --freeze."""
        check_same_trained(path, described.config, self.config.adapters)
        saved = checkpoint.model_config(path, described.config, self.model)
        stages = [(not each.trains_indexers_alone, each.trains_indexers) for each in (saved, self.model)]
        if stages[0] != stages[1]:
            then, now = (
                f"--dsa-stage {each.dsa_stage} with --dsa-indexer-loss-coeff {each.dsa_indexer_loss_coeff or 0:g}"
                for each in (saved, self.model)
            )
            raise CheckpointError(
                f"{path} is of a run that trained other weights, and its optimizer state is not of those of this one: "
                f"{then}, here {now}. Give --no-load-optim to go on with new state, --finetune to begin at step 0"
            )

    def optional_tensors(self, path: AnyPath, described: Manifest) -> set[str]:
        """Return the names of the state that only training needs, here or in the run that saved the checkpoint.

        With --finetune, also those of depths and indexers that only one of the two has.
        """
        saved = checkpoint.model_config(path, described.config, self.model)
        models = [model for model in (self.model, saved) if model.num_experts is not None]
        found = {name for model in models for name in states_of_training(model)}
        if not self.saves_frozen:
            found |= {MODEL + name for name in self._names(trained=False)}
        return found.union(*map(in_checkpoint, self._replaced(saved)))

    def _replaced(self, saved: ModelConfig) -> list[set[str]]:
        """Return the names of this run's tensors that begin anew, and of the checkpoint's that are left out.

        They are those of indexers that the other one lacks and, if the two have other depths, those of depths.
        """
        if saved == self.model:
            return [set(), set()]
        ours, theirs = map(tensors_of_indexers, (self.model, saved))
        found = [ours - theirs, theirs - ours]
        if checkpoint.same_depths(saved, self.model):
            return found
        return [names | tensors_of_depths(each) for names, each in zip(found, (self.model, saved), strict=True)]

    def _check_function(self, what: str, saved: ModelConfig) -> None:
        """Raise CheckpointError if a network computes another function.

        With --allow-changed-rotary, the base and the scaling of its rotary embeddings may differ. With --finetune, its
        depths may differ, which of its layers have an indexer, and how many keys these choose.
        """
        model, self.network_notes = self.model, ()
        if self.config.checkpoint.allow_changed_rotary:
            saved, changes = checkpoint.with_rotary_of(saved, model)
            if changes:
                self.network_notes += (f"note: other rotary embeddings than in {what}: {changes}",)
        if self.config.checkpoint.finetune:
            anew, left_out = (sum(each.endswith(".indexer.query") for each in names) for names in self._replaced(saved))
            if checkpoint.indexers_agree(saved, model):
                if anew or left_out:
                    self._note(what, "indexers", left_out, anew)
                then, now = saved.dsa_indexer_topk, model.dsa_indexer_topk
                if then and now and then != now:
                    self.network_notes += (f"note: indexers choose {now} keys, and chose {then} in {what}",)
                saved, model = without_indexers(saved), without_indexers(model)
            if not checkpoint.same_depths(saved, model):
                self._note(what, "depths of multi-token prediction", saved.depths, model.depths)
                saved, model = without_depths(saved), without_depths(model)
        checkpoint.check_same_function(what, saved, model)

    def _note(self, what: str, parts: str, left_out: int, anew: int) -> None:
        """Note how many of these parts --finetune leaves out of a checkpoint, and how many it begins anew.

        Raises CheckpointError if it cannot begin any.
        """
        kind = parts.partition(" ")[0]
        if anew and not self.saves_frozen:
            raise CheckpointError(
                f"{what} does not have the {parts} of this run ({anew}), and --lora-rank would never train them: begin "
                "them anew in a run that trains all weights"
            )
        if self.config.checkpoint.load_casts and anew:
            raise CheckpointError(
                f"{what} does not have the {parts} of this run ({anew}), which begins them anew, as --load-casts "
                "cannot: leave it out"
            )
        fates = {f"leaves out its {kind} ({left_out})": left_out, f"begins those of this run anew ({anew})": anew}
        said = " and ".join(words for words, count in fates.items() if count)
        self.network_notes += (f"note: {what} has other {parts}: --finetune {said}",)

    def open_weights(self, path: AnyPath) -> OpenedModel:
        """See `Task`. Adapters are not merged if the run trains them on."""
        opened = open_initial_model(path)
        if opened.adapters is not None and not self.saves_frozen:
            check_same_adapters(opened.what, opened.adapters.config, self.config.adapters, self.model)
            opened = replace(opened, source=opened.adapters.joined())
        if self.config.checkpoint.resize_vocabulary:
            from megalite.conversion.vocabulary import with_more_tokens

            opened = with_more_tokens(opened, self.model.vocab_size)
        if self.config.checkpoint.moe_use_upcycling:
            from megalite.conversion.upcycling import upcycled

            opened = upcycled(opened, self.model, self.config.training.seed)
        return opened

    def check_weights(self, opened: OpenedModel) -> set[str]:
        self._check_function(opened.what, opened.config)
        fresh = states_of_training(self.model).union(*self._replaced(opened.config)[:1])
        return fresh if self.saves_frozen else fresh | (self._names(trained=True) - opened.source.tensors.keys())

    def _names(self, *, trained: bool) -> set[str]:
        """Return the names of the weights of this rank that are trained, or of those that are frozen."""
        every = (each for chunk in self.chunks for each in named_pieces(chunk))
        return {piece.tensor.name for parameter, piece in every if parameter.requires_grad is trained}

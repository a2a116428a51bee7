"""Networks without gradients beside the one that is trained: DPO's reference, an earlier policy, a teacher.

They are sharded by its rules, over the same ranks, under ZeRO 3 also over the data-parallel ones, and gathered block by
block. They send hidden states over its links, and have neither gradients nor optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from megalite.checkpoint import load_weights
from megalite.checkpoint.compatibility import function_of
from megalite.config import ModelConfig, OptimizerConfig
from megalite.config.pipeline_layout import StageLayers
from megalite.config.prediction import without_depths
from megalite.conversion.opened import OpenedModel, states_of_training
from megalite.errors import ConfigurationError
from megalite.extras.post_training.log_probabilities import TokenOutputs, log_probabilities
from megalite.inference.network import check_layout, stage_parts
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT, make_chunks
from megalite.model.head import LossConfig
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import Optimizer, make_optimizer
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.rounded_products import UNROUNDED, Roundings, kept_codes
from megalite.parallel.stage import TensorSpec
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.schedules import Action
from megalite.tasks.experts import with_dispatcher


def frozen(
    stages: Sequence[GPT], config: OptimizerConfig, options: DataParallel, mesh: ParallelMesh
) -> tuple[nn.ModuleList, Optimizer]:
    """Freeze stages. Returns them as one module in evaluation mode, and the holder of their parameters."""
    network = nn.ModuleList(stages).requires_grad_(False).eval()
    return network, make_optimizer(stages, mesh, config, options, blocks=[stage.blocks() for stage in stages])


class FrozenNetwork:
    """Network without gradients on the ranks of the network that is trained. Its values are not set yet."""

    def __init__(
        self,
        config: ModelConfig,
        parts: Sequence[StageLayers],
        trained: Sequence[GPT],
        engine: PipelineEngine[MicroBatch],
        optimizer: Optimizer,
        *,
        output_apart: bool = False,
        roundings: Roundings = UNROUNDED,
    ) -> None:
        """Make this rank's stages, with the layers `parts`, beside those of the network that is trained.

        Args:
            output_apart: the last stage returns hidden states, and `output`, on its rank, makes logits of them.
            roundings: how layers round the operands of their products.
        """
        whole = list(parts)
        if output_apart and any(part.loss for part in parts):
            whole = [replace(part, loss=False) for part in parts]
            whole.append(StageLayers(config.num_layers, 0, embedding=False, loss=True))
        first, stages = trained[0], engine.stages
        self.config, self.dtype, self.roundings = config, first.dtype, roundings
        mesh, ranks = first.mesh, first.mesh.ranks("pp")
        heads = [chunk.head for chunk in trained if chunk.head is not None]
        made = make_chunks(
            config,
            mesh,
            whole,
            tuple(ranks[rank] for rank in stages.ends),
            sequence_parallel=first.context.sequence_parallel,
            loss=LossConfig(fused=any(head.output.fused for head in heads)),
            dtype=first.dtype,
            attention_ways=first.context.attention_ways,
            roundings=roundings,
        )
        self.chunks, self.output = made[: len(parts)], made[len(parts) :]
        self.network, self.optimizer = frozen(made, optimizer.config, optimizer.options, mesh)
        messages = tuple(tuple(_with_width(spec, config.hidden_size) for spec in border) for border in stages.messages)
        self.engine = PipelineEngine(
            self.chunks, replace(stages, messages=messages), engine.rank, engine.links, engine.device
        )
        self.engine.within = partial(kept_codes, self.chunks)

    def log_probabilities(
        self,
        actions: Iterable[Action],
        micro_batches: Sequence[MicroBatch],
        *,
        entropies: bool = False,
        parts: bool = False,
    ) -> list[TokenOutputs]:
        """Return the network's outputs for each micro-batch, as the function `log_probabilities` does."""
        return log_probabilities(self.chunks, self.engine, actions, micro_batches, entropies=entropies, parts=parts)


def _with_width(spec: TensorSpec, width: int) -> TensorSpec:
    return replace(spec, shape=None if spec.shape is None else (*spec.shape[:-1], width))


class Reference(FrozenNetwork):
    """Copy of the network that is trained, with its current weights."""

    def __init__(self, chunks: Sequence[GPT], engine: PipelineEngine[MicroBatch], optimizer: Optimizer) -> None:
        """Copy this rank's stages. All ranks make it together.

        Raises ConfigurationError if a part of the network is frozen.
        """
        if optimizer.frozen:
            raise ConfigurationError(
                "run.reference() copies a network that is trained whole, and a part of this one is frozen: "
                "run.teacher(FOLDER) loads its base beside it"
            )
        parts, roundings = [chunk.stage_layers for chunk in chunks], chunks[0].roundings
        super().__init__(chunks[0].config, parts, chunks, engine, optimizer, roundings=roundings)
        self._trained = optimizer
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the current weights of the network that is trained. All ranks call it together."""
        self._trained.finish_parameter_gather()
        for own, trained in zip(self.optimizer.frozen, self._trained.buckets, strict=True):
            if own.zero_stage == 3:
                own.release_slice()
                own.parameter_shard.copy_(trained.parameter_shard)
            else:
                own.parameters.copy_(trained.parameters)
        for state, values in zip(self.optimizer.module_states, self._trained.module_states, strict=True):
            state.values.copy_(values.values)


def load_teacher(
    opened: OpenedModel,
    chunks: Sequence[GPT],
    engine: PipelineEngine[MicroBatch],
    optimizer: Optimizer,
    *,
    output_apart: bool = False,
) -> FrozenNetwork:
    """Return another model beside the network that is trained, on the same ranks. All ranks call it together.

    One that computes the same function with its weights rounds products as the network does: with the same weights, it
    has the same bits. `output_apart`: as for `FrozenNetwork`; such a model does not round.

    Raises ConfigurationError if the layout cannot divide it or it lacks tokens, and CheckpointError if it cannot be
    read.
    """
    opened = opened.without_depths()
    mesh, stages = chunks[0].mesh, engine.stages
    config, _ = with_dispatcher(opened.config, chunks[0].dtype, mesh)
    check_layout(config, mesh.size("tp"), stages.count)
    if (config.vocab_size or 0) < (known := chunks[0].vocab_size):
        raise ConfigurationError(
            f"{opened.what} has {config.vocab_size} tokens, but the network that is trained has {known}: choose a "
            "model with the same tokenizer"
        )
    parts = stage_parts(config.num_layers, stages.count)
    own = [parts[stage] for stage in stages.of_rank(engine.rank)]
    is_alike = not output_apart and function_of(config) == function_of(without_depths(chunks[0].config))
    roundings = chunks[0].roundings if is_alike else UNROUNDED
    found = FrozenNetwork(config, own, chunks, engine, optimizer, output_apart=output_apart, roundings=roundings)
    load_weights(opened.source, opened.what, found.network, found.optimizer, mesh, states_of_training(config))
    return found

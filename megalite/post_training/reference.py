"""Networks without gradients beside the one that is trained: DPO's reference, an earlier policy, a teacher.

They are sharded by its rules, over the same tensor- and pipeline-parallel ranks, and send hidden states over its links.
They have neither gradients nor optimizer state. A `Reference` is also sharded over the data-parallel ranks if ZeRO 3
shards the weights, which it gathers block by block; a teacher is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from megalite.checkpoint import load_weights
from megalite.config import ModelConfig
from megalite.config.pipeline_layout import StageLayers
from megalite.conversion.opened import OpenedModel
from megalite.errors import ConfigurationError
from megalite.inference.network import check_layout, stage_parts
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT, make_chunks
from megalite.model.head import LossConfig
from megalite.optim.buckets import ParameterBucket
from megalite.optim.gathering import gather_around_forward
from megalite.optim.layout import unique_parameters
from megalite.optim.optimizer import Optimizer
from megalite.parallel.stage import TensorSpec
from megalite.parallel.state import states_of
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.schedules import Action
from megalite.post_training.log_probabilities import TokenOutputs, log_probabilities


class FrozenNetwork:
    """Network without gradients on the ranks of the network that is trained. Its values are not set yet."""

    def __init__(
        self,
        config: ModelConfig,
        parts: Sequence[StageLayers],
        trained: Sequence[GPT],
        engine: PipelineEngine[MicroBatch],
    ) -> None:
        """Make this rank's stages, with the layers `parts`, beside those of the network that is trained."""
        first, stages = trained[0], engine.stages
        mesh, ranks = first.mesh, first.mesh.ranks("pp")
        heads = [chunk.head for chunk in trained if chunk.head is not None]
        self.chunks = make_chunks(
            config,
            mesh,
            parts,
            tuple(ranks[rank] for rank in stages.ends),
            sequence_parallel=first.context.sequence_parallel,
            loss=LossConfig(fused=any(head.output.fused for head in heads)),
            dtype=first.dtype,
            attention_ways=first.context.attention_ways,
        )
        self.network = nn.ModuleList(self.chunks).requires_grad_(False).eval()
        messages = tuple(tuple(_with_width(spec, config.hidden_size) for spec in border) for border in stages.messages)
        self.engine = PipelineEngine(
            self.chunks, replace(stages, messages=messages), engine.rank, engine.links, engine.device
        )

    def log_probabilities(
        self, actions: Iterable[Action], micro_batches: Sequence[MicroBatch], *, entropies: bool = False
    ) -> list[TokenOutputs]:
        """Return the network's outputs for each micro-batch, as the function `log_probabilities` does."""
        return log_probabilities(self.chunks, self.engine, actions, micro_batches, entropies=entropies)


def _with_width(spec: TensorSpec, width: int) -> TensorSpec:
    return replace(spec, shape=None if spec.shape is None else (*spec.shape[:-1], width))


class Reference(FrozenNetwork):
    """Copy of the network that is trained, with its current weights."""

    def __init__(self, chunks: Sequence[GPT], engine: PipelineEngine[MicroBatch], optimizer: Optimizer) -> None:
        """Copy this rank's stages. All ranks make it together."""
        super().__init__(chunks[0].config, [chunk.stage_layers for chunk in chunks], chunks, engine)
        self._trained, self._optimizer = nn.ModuleList(chunks), optimizer
        trained = map(id, unique_parameters(self._trained))
        copy_of = dict(zip(trained, unique_parameters(self.network), strict=True))
        self._buckets = []
        for bucket in optimizer.buckets:
            slots = tuple(replace(slot, parameter=copy_of[id(slot.parameter)]) for slot in bucket.slots)
            shard_spec = replace(bucket.shard_spec, layout=replace(bucket.layout, slots=slots))
            prefetch = bucket.prefetch
            copy = ParameterBucket(shard_spec, bucket.shard_group, prefetch=prefetch, set_values=lambda _: None)
            self._buckets.append(copy)
        for chunk in self.chunks:
            gather_around_forward(chunk, chunk.blocks(), self._buckets)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the current weights of the network that is trained. All ranks call it together."""
        self._optimizer.finish_parameter_gather()
        for own, trained in zip(self._buckets, self._optimizer.buckets, strict=True):
            if own.zero_stage == 3:
                own.parameter_shard.copy_(trained.parameter_shard)
            else:
                own.parameters.copy_(trained.parameters)
        for state, values in zip(states_of(self.network), states_of(self._trained), strict=True):
            state.values.copy_(values.values)


def load_teacher(opened: OpenedModel, chunks: Sequence[GPT], engine: PipelineEngine[MicroBatch]) -> FrozenNetwork:
    """Return another model beside the network that is trained, on the same ranks. All ranks call it together.

    Its weights are whole on each data-parallel rank. Raises ConfigurationError if the layout cannot divide it or it
    lacks tokens, and CheckpointError if it cannot be read.
    """
    config, mesh, stages = opened.config, chunks[0].mesh, engine.stages
    check_layout(config, mesh.size("tp"), stages.count)
    if (config.vocab_size or 0) < (known := chunks[0].vocab_size):
        raise ConfigurationError(
            f"{opened.what} has {config.vocab_size} tokens, but the network that is trained has {known}: choose a "
            "model with the same tokenizer"
        )
    parts = stage_parts(config.num_layers, stages.count)
    found = FrozenNetwork(config, [parts[stage] for stage in stages.of_rank(engine.rank)], chunks, engine)
    load_weights(opened.source, opened.what, found.network, None, mesh)
    return found

"""Copy of the network without gradients, such as the reference of DPO, or an earlier policy.

It is sharded by the rules of the network that is trained: over the same tensor- and pipeline-parallel ranks and, under
ZeRO 3, over the data-parallel ranks, which gather it block by block. It has neither gradients nor optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT, make_chunks
from megalite.model.head import LossConfig
from megalite.optim.buckets import ParameterBucket
from megalite.optim.gathering import gather_around_forward
from megalite.optim.layout import unique_parameters
from megalite.optim.optimizer import Optimizer
from megalite.parallel.state import states_of
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.schedules import Action
from megalite.post_training.log_probabilities import TokenOutputs, log_probabilities


class Reference:
    """Frozen copy of a network, with its current weights."""

    def __init__(self, chunks: Sequence[GPT], engine: PipelineEngine[MicroBatch], optimizer: Optimizer) -> None:
        """Copy this rank's stages. All ranks make it together; the copies use the links of `engine`."""
        first, mesh, stages = chunks[0], optimizer.mesh, engine.stages
        ranks = mesh.ranks("pp")
        heads = [chunk.head for chunk in chunks if chunk.head is not None]
        self.chunks = make_chunks(
            first.config,
            mesh,
            [chunk.stage_layers for chunk in chunks],
            tuple(ranks[rank] for rank in stages.ends),
            sequence_parallel=first.context.sequence_parallel,
            loss=LossConfig(fused=any(head.output.fused for head in heads)),
            dtype=first.dtype,
            attention_ways=first.context.attention_ways,
        )
        self._trained, self._optimizer = nn.ModuleList(chunks), optimizer
        self._network = nn.ModuleList(self.chunks).requires_grad_(False).eval()
        trained = map(id, unique_parameters(self._trained))
        copy_of = dict(zip(trained, unique_parameters(self._network), strict=True))
        self._buckets = []
        for bucket in optimizer.buckets:
            slots = tuple(replace(slot, parameter=copy_of[id(slot.parameter)]) for slot in bucket.slots)
            shard_spec = replace(bucket.shard_spec, layout=replace(bucket.layout, slots=slots))
            prefetch = bucket.prefetch
            copy = ParameterBucket(shard_spec, bucket.shard_group, prefetch=prefetch, set_values=lambda _: None)
            self._buckets.append(copy)
        for chunk in self.chunks:
            gather_around_forward(chunk, chunk.blocks(), self._buckets)
        self.engine = PipelineEngine(self.chunks, stages, engine.rank, engine.links, engine.device)
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
        for state, values in zip(states_of(self._network), states_of(self._trained), strict=True):
            state.values.copy_(values.values)

    def log_probabilities(
        self, actions: Iterable[Action], micro_batches: Sequence[MicroBatch], *, entropies: bool = False
    ) -> list[TokenOutputs]:
        """Return the copy's outputs for each micro-batch, as the function `log_probabilities` does."""
        return log_probabilities(self.chunks, self.engine, actions, micro_batches, entropies=entropies)

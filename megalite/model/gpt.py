"""A GPT as one pipeline stage: embedding, blocks, final norm, output layer and loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.config.model import ModelConfig
from megalite.model.batch import LayerContext, MicroBatch, document_mask
from megalite.model.block import Block
from megalite.model.embedding import Embedding
from megalite.model.head import Head
from megalite.model.recompute import Recompute
from megalite.model.rotary import rotary_tables
from megalite.parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.parallel.mesh import ParallelMesh


class GPT(nn.Module):
    """GPT-2- and Llama-style language models; which one, the configuration says."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: ParallelMesh,
        *,
        sequence_parallel: bool = False,
        recompute: Recompute | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Build this rank's share on the mesh's device, its values not yet set (see `initialize`)."""
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("the model's vocabulary size is not set")
        sequence_parallel = sequence_parallel and mesh.size("tp") > 1
        self.config, self.mesh, self.dtype, self.recompute = config, mesh, dtype, recompute or Recompute()
        self.vocab_size: int = config.vocab_size
        self.embedding = Embedding(config, mesh, self.vocab_size, sequence_parallel=sequence_parallel, dtype=dtype)
        self.layers = nn.ModuleList(
            Block(
                config,
                mesh,
                layer,
                sequence_parallel=sequence_parallel,
                recompute_attention=self.recompute.attention,
                dtype=dtype,
            )
            for layer in range(config.num_layers)
        )
        tied = None if config.untie_embeddings_and_output_weights else self.embedding.word.weight
        if tied is not None:
            tied.sharding = replace(tied.sharding, uses=2)
        self.head = Head(config, mesh, self.vocab_size, tied, sequence_parallel=sequence_parallel, dtype=dtype)

    def blocks(self) -> list[nn.Module]:
        """The parts that forward runs one after the other; together they hold every parameter."""
        return [self.embedding, *self.layers, self.head]

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """The sum of the micro-batch's token losses times their mask, or its logits where it has no labels.

        Logits are [sequence, batch, padded vocabulary / tensor-parallel size]. `hidden` is None: the first stage is
        this one.
        """
        context = self._context(micro_batch)
        hidden = self.embedding(micro_batch.tokens, micro_batch.positions, micro_batch.key)
        logits: Tensor = self.head(self._run_layers(hidden, context))
        if micro_batch.labels is None or micro_batch.loss_mask is None:
            return logits
        losses = vocab_parallel_cross_entropy(logits, micro_batch.labels.t(), self.mesh.group("tp"), self.vocab_size)
        return (losses * micro_batch.loss_mask.t()).sum()

    def _context(self, micro_batch: MicroBatch) -> LayerContext:
        rotary = None
        if self.config.position_embedding_type == "rope":
            rotary = rotary_tables(self.config, micro_batch.positions, self.dtype)
        documents = micro_batch.document_ids
        return LayerContext(rotary, None if documents is None else document_mask(documents), micro_batch.key)

    def _run_layers(self, hidden: Tensor, context: LayerContext) -> Tensor:
        for start, stop, recomputed in self.recompute.spans(len(self.layers)):
            layers = list(self.layers)[start:stop]
            if recomputed and torch.is_grad_enabled():
                hidden = checkpoint(_run, layers, hidden, context, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = _run(layers, hidden, context)
        return hidden


def _run(layers: Sequence[nn.Module], hidden: Tensor, context: LayerContext) -> Tensor:
    for layer in layers:
        hidden = layer(hidden, context)
    return hidden

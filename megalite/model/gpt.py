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
from megalite.model.norm import Norm
from megalite.model.recompute import Recompute
from megalite.model.rotary import rotary_tables
from megalite.parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.parallel.linear import ColumnParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.placement import split
from megalite.parallel.sharding import LogicalTensor, Normal, Sharding


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
        self.final_norm = Norm(config, mesh, "final_norm", config.hidden_size, summed=sequence_parallel, dtype=dtype)
        self.output = ColumnParallelLinear(
            [self._output_weight()],
            [],
            mesh.group("tp"),
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=mesh.device,
        )

    def _output_weight(self) -> Parameter | Sharding:
        if not self.config.untie_embeddings_and_output_weights:
            word = self.embedding.word.weight
            word.sharding = replace(word.sharding, uses=2)
            return word
        shape = (self.vocab_size, self.config.hidden_size)
        output = LogicalTensor("output", shape, Normal(self.config.init_method_std), weight_decay=True)
        return split(self.mesh, output, 0, padded=self.config.padded_vocab_size(self.mesh.size("tp")))

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """The sum of the micro-batch's token losses times their mask, or its logits where it has no labels.

        Logits are [sequence, batch, padded vocabulary / tensor-parallel size]. `hidden` is None: the first stage is
        this one.
        """
        context = self._context(micro_batch)
        hidden = self.embedding(micro_batch.tokens, micro_batch.positions, micro_batch.key)
        hidden = self.final_norm(self._run_layers(hidden, context))
        logits: Tensor = self.output(hidden)
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

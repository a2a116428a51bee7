"""Word and learned position embeddings."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.parallel.context import ParallelContext
from megalite.parallel.embedding import VocabParallelEmbedding
from megalite.parallel.randomness import RandomKey, Site, dropout
from megalite.parallel.sequence import Runs
from megalite.parallel.sharding import LogicalTensor, Normal, Sharding


def token_table(config: ModelConfig, context: ParallelContext, name: str, vocab_size: int) -> Sharding:
    """Place a table with a row per token, with its vocabulary split over the tensor-parallel ranks."""
    shape, draw = (vocab_size, config.hidden_size), Normal(config.init_method_std)
    table = LogicalTensor(name, shape, draw, True, is_embedding_or_output=True)
    padded = config.padded_vocab_size(context.group("vocabulary").size)
    return context.split(table, {0: "vocabulary"}, padded=padded)


def word_sharding(config: ModelConfig, context: ParallelContext, vocab_size: int, copies: tuple[int, ...]) -> Sharding:
    """Place the word embedding.

    `copies`: the ranks that hold this part of the weight, for the embedding or for an output layer tied to it.
    """
    record = token_table(config, context, "embedding.word", vocab_size)
    return replace(record, replica_ranks=copies, grad_is_partial=len(copies) > 1)


class Embedding(nn.Module):
    """Sum of word embeddings and, if configured, learned position embeddings.

    `word`: the placement of the word embedding.
    """

    def __init__(self, config: ModelConfig, context: ParallelContext, word: Sharding) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(context, word)
        self.position = None
        if config.position_embedding_type == "learned_absolute":
            if config.max_position_embeddings is None:
                raise ValueError("a learned position table needs max_position_embeddings")
            shape = (config.max_position_embeddings, config.hidden_size)
            position = LogicalTensor("embedding.position", shape, Normal(config.init_method_std), True)
            self.position = context.parameter(context.replicated(position))
        self.scale = None
        if config.scale_embeddings:
            # Rounded to the dtype of the weights, as in Hugging Face's Gemma.
            self.scale = torch.tensor(math.sqrt(config.hidden_size), dtype=context.dtype).item()
        self.dropout = config.hidden_dropout
        self.shard = context.shard
        self.site = Site(0, "embedding")

    def forward(self, tokens: Tensor, positions: Tensor, key: RandomKey, rows: Runs) -> Tensor:
        """Embed tokens at positions, both [batch, sequence].

        Args:
            rows: indices in the sample of the tokens of the result, for dropout.

        Returns:
            [sequence (/ size under sequence parallelism), batch, hidden].
        """
        hidden: Tensor = self.word(tokens.t())
        if self.scale is not None:
            hidden = hidden * self.scale
        if self.position is not None:
            own = positions.t().split(len(hidden))[self.shard]
            hidden = hidden + F.embedding(own, self.position)
        return dropout(hidden, self.dropout if self.training else 0.0, key, self.site, rows)

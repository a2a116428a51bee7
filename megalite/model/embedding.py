"""Word and learned position embeddings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.parallel.context import ParallelContext
from megalite.parallel.embedding import VocabParallelEmbedding
from megalite.parallel.randomness import RandomKey, Site, dropout
from megalite.parallel.sequence import Runs
from megalite.parallel.sharding import LogicalTensor, Normal, Sharding


def token_table(context: ParallelContext, name: str, shape: tuple[int, int], padded: int, std: float) -> Sharding:
    """Place a table with a row per token, [vocabulary, hidden], its rows split over the tensor-parallel ranks.

    `padded`: the number of rows with padding, which is divided over the ranks.
    """
    table = LogicalTensor(name, shape, Normal(std), True, is_embedding_or_output=True)
    return context.split(table, {0: "vocabulary"}, padded=padded)


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """Return the factor of word embeddings in a network whose weights have this dtype."""
    # The root is rounded to the dtype of the weights, as in Hugging Face's Gemma.
    root = torch.tensor(math.sqrt(config.hidden_size), dtype=dtype).item() if config.scale_embeddings else 1.0
    return root * config.embedding_multiplier


class Embedding(nn.Module):
    """Sum of word embeddings and, if there are any, learned position embeddings."""

    def __init__(
        self,
        context: ParallelContext,
        word: Sharding,
        hidden: int,
        *,
        positions: int | None,
        std: float,
        scale: float,
        dropout: float,
    ) -> None:
        """Make the layer.

        Args:
            word: the placement of the word embedding.
            positions: number of learned positions; None for no such table.
            std: standard deviation of the initial values of positions.
            scale: factor of word embeddings.
        """
        super().__init__()
        self.word = VocabParallelEmbedding(context, word)
        self.position = None
        if positions is not None:
            position = LogicalTensor("embedding.position", (positions, hidden), Normal(std), True)
            self.position = context.parameter(context.replicated(position))
        self.scale, self.dropout = scale, dropout
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
        if self.scale != 1.0:
            hidden = hidden * self.scale
        if self.position is not None:
            own = positions.t().split(len(hidden))[self.shard]
            hidden = hidden + F.embedding(own, self.position)
        return dropout(hidden, self.dropout if self.training else 0.0, key, self.site, rows)

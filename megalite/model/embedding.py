"""Word and learned position embeddings."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.parallel.embedding import VocabParallelEmbedding
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.placement import replicated, split
from megalite.parallel.randomness import RandomKey, Site, dropout
from megalite.parallel.sharding import LogicalTensor, Normal, Sharding


def word_sharding(config: ModelConfig, mesh: ParallelMesh, vocab_size: int, copies: tuple[int, ...]) -> Sharding:
    """The word embedding on this rank, and with it on all `copies`: those of the output layer that it is tied to."""
    draw = Normal(config.init_method_std)
    word = LogicalTensor("embedding.word", (vocab_size, config.hidden_size), draw, True, token_table=True)
    record = split(mesh, word, 0, padded=config.padded_vocab_size(mesh.size("tp")))
    return replace(record, copies=copies, summed=len(copies) > 1)


class Embedding(nn.Module):
    """`word`: the placement of the word embedding."""

    def __init__(
        self, config: ModelConfig, mesh: ParallelMesh, word: Sharding, *, sequence_parallel: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(
            word,
            mesh.group("tp"),
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=mesh.device,
        )
        self.position = None
        if config.position_embedding_type == "learned_absolute":
            if config.max_position_embeddings is None:
                raise ValueError("a learned position table needs max_position_embeddings")
            shape = (config.max_position_embeddings, config.hidden_size)
            position = LogicalTensor("embedding.position", shape, Normal(config.init_method_std), True)
            self.position = Parameter(replicated(mesh, position, summed=sequence_parallel), dtype, mesh.device)
        self.group, self.sequence_parallel = mesh.group("tp"), sequence_parallel
        self.scale = None
        if config.scale_embeddings:
            self.scale = torch.tensor(math.sqrt(config.hidden_size), dtype=dtype).item()
        self.dropout = config.hidden_dropout
        self.site = Site(-1, "embedding", mesh.coordinate("tp") if sequence_parallel else 0)

    def forward(self, tokens: Tensor, positions: Tensor, key: RandomKey) -> Tensor:
        """tokens and positions [batch, sequence] to [sequence (/ size under sequence parallelism), batch, hidden]."""
        hidden: Tensor = self.word(tokens.t())
        if self.scale is not None:
            hidden = hidden * self.scale
        if self.position is not None:
            local = positions.t()
            if self.sequence_parallel:
                local = local.chunk(self.group.size)[self.group.rank]
            hidden = hidden + F.embedding(local, self.position)
        return dropout(hidden, self.dropout if self.training else 0.0, key, self.site)

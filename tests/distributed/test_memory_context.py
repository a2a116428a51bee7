"""Bytes that a context-parallel rank keeps from forward to backward, compared with one rank."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.data.loader import MicroBatchArrays
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.context import AttentionWay
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.tasks import memory
from megalite.training.batches import Cutting, to_micro_batches
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

WAYS = {
    "p2p": AttentionWay(),
    "a2a+p2p": AttentionWay(2),
    "a2a": AttentionWay(4),
}
WIDE = {"num_layers": 3, "hidden_size": 128, "num_attention_heads": 4, "ffn_hidden_size": 384, "vocab_size": 250}
TOKENS = (2, 64)  # batch, sequence
MODELS = {
    "gpt2": ModelConfig(**WIDE, max_position_embeddings=64, hidden_dropout=0.0, attention_dropout=0.0),
    "llama": ModelConfig(
        **WIDE,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        qk_layernorm=True,
        group_query_attention=True,
        num_query_groups=2,
        untie_embeddings_and_output_weights=True,
        window_size="63,0",
        window_attn_skip_freq="2",
        window_rotary_base=500.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
}


def micro_batch(mesh: ParallelMesh, dtype: torch.dtype) -> MicroBatch:
    """Return this rank's part of samples of zeros."""
    zeros, batch = np.zeros(TOKENS, dtype=np.int64), TOKENS[0]
    fields = MicroBatchArrays(
        tokens=np.arange(zeros.size).reshape(TOKENS) % 250,
        labels=zeros,
        loss_mask=np.ones(TOKENS, dtype=np.float32),
        positions=np.broadcast_to(np.arange(TOKENS[1]), TOKENS),
        document_ids=None,
        padding=None,
        replayed=None,
        sample_ids=range(batch),
    )
    cutting = Cutting(mesh.size("cp"), mesh.coordinate("cp"))
    (found,) = to_micro_batches([fields], 1, dtype, mesh.device, cutting)
    return found


def activations(mesh: ParallelMesh, model: str, way: AttentionWay) -> int:
    """Return the bytes that a micro-batch keeps for backward."""
    network = GPT(MODELS[model], mesh, dtype=torch.bfloat16, attention_ways=(way,))
    initialize(network, seed=1)
    options = DataParallel(torch.float32, 0)
    optimizer = make_optimizer([network], mesh, OptimizerConfig(lr=0.01), options, blocks=[network.blocks()])
    batch = micro_batch(mesh, torch.bfloat16)
    return memory.measured(optimizer, [functools.partial(network, {}, batch)]).activations


def at_one_and_four_ranks(way: str, model: str) -> float:
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=4, context_parallel_size=4)
    return activations(mesh, model, WAYS[way]) / activations(ParallelMesh(), model, AttentionWay())


@pytest.mark.parametrize("way", wide_except(WAYS, ["a2a+p2p"]))
def test_four_ranks_keep_little_more_than_a_fourth_each(way: str, rank_pools: RankPools) -> None:
    for model in ("gpt2", "llama"):
        assert max(rank_pools(4).run(at_one_and_four_ranks, way, model)) <= 0.30

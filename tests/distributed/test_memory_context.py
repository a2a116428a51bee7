"""Bytes that a context-parallel rank keeps from forward to backward, compared with the formula and with one rank."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

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
from tests.distributed.layout_cell import RECOMPUTE
from tests.distributed.test_memory import MODELS, TOKENS
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

WAYS: dict[int, dict[str, tuple[AttentionWay, ...]]] = {
    2: {
        "p2p": (AttentionWay(),),
        "all_gather": (AttentionWay(gathers=True),),
        "a2a": (AttentionWay(2),),
        "one per layer": (AttentionWay(2), AttentionWay(), AttentionWay(gathers=True)),
    },
    4: {"p2p": (AttentionWay(),), "a2a+p2p": (AttentionWay(2),), "a2a": (AttentionWay(4),)},
}
SHARED = {name: MODELS[name] for name in ("gpt2", "gpt-neox", "llama", "experts")}
SHARED["one group"] = replace(SHARED["llama"], num_query_groups=1, qk_layernorm=False)


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


def activations(
    mesh: ParallelMesh, model: str, ways: tuple[AttentionWay, ...], recompute: str, dtype: torch.dtype, tp: int = 1
) -> tuple[int, int]:
    """Return measured and calculated bytes of the activations."""
    config, again, split = SHARED[model], RECOMPUTE[recompute], tp > 1
    network = GPT(config, mesh, recompute=again, dtype=dtype, attention_ways=ways, sequence_parallel=split)
    initialize(network, seed=1)
    options = DataParallel(torch.float32, 0)
    optimizer = make_optimizer([network], mesh, OptimizerConfig(lr=0.01), options, blocks=[network.blocks()])
    batch = micro_batch(mesh, dtype)
    seen = memory.measured(optimizer, [functools.partial(network, {}, batch)]).activations
    expected = memory.activation_bytes(
        config,
        tokens=batch.tokens.numel(),
        dtype=dtype,
        tensor_parallel_size=tp,
        sequence_parallel=split,
        recompute=again,
        context_parallel_size=mesh.size("cp"),
        attention_ways=ways,
    )
    return seen, expected


def of_all(cp: int, way: str) -> dict[str, tuple[int, int]]:
    """Return measured and calculated bytes for every model, and for pairs of precision and recomputation."""
    world = dist.get_world_size()
    mesh = ParallelMesh(
        rank=dist.get_rank(), world_size=world, context_parallel_size=cp, tensor_parallel_size=world // cp
    )
    kinds = itertools.cycle(itertools.product((torch.float32, torch.bfloat16), RECOMPUTE))
    return {
        f"{model} {recompute} {dtype}": activations(mesh, model, WAYS[cp][way], recompute, dtype, world // cp)
        for model in SHARED
        for dtype, recompute in itertools.islice(kinds, len(RECOMPUTE) + 1)
    }


@pytest.mark.wide
@pytest.mark.parametrize(
    ("ranks", "cp", "way"),
    [
        *((2, 2, way) for way in ("p2p", "all_gather", "a2a", "one per layer")),
        *((4, *case) for case in ((2, "one per layer"), (4, "a2a+p2p"), (4, "a2a"))),
    ],
)
def test_the_formula_counts_what_is_kept(ranks: int, cp: int, way: str, rank_pools: RankPools) -> None:
    """The other two of four ranks are tensor-parallel."""
    for found in rank_pools(ranks).run(of_all, cp, way):
        for case, (seen, expected) in found.items():
            tolerance = 0.025 if case.startswith("experts") else 0.01  # loads of experts are not quite even
            assert seen == pytest.approx(expected, rel=tolerance), case


def at_one_and_four_ranks(way: str, model: str) -> float:
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=4, context_parallel_size=4)
    whole, _ = activations(ParallelMesh(), model, (AttentionWay(),), "none", torch.bfloat16)
    part, _ = activations(mesh, model, WAYS[4][way], "none", torch.bfloat16)
    return part / whole


@pytest.mark.parametrize("way", wide_except(WAYS[4], ["a2a+p2p"]))
def test_four_ranks_keep_little_more_than_a_fourth_each(way: str, rank_pools: RankPools) -> None:
    for model in ("gpt2", "llama"):
        assert max(rank_pools(4).run(at_one_and_four_ranks, way, model)) <= 0.30

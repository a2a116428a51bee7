"""Routers whose samples are split over ranks choose, drop, count and record as one that has whole samples."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.data.routing_records import RoutingRecords
from megalite.model.batch import LayerContext, MicroBatch
from megalite.model.moe import MoE
from megalite.model.router import Router
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import ChunkTable, SequenceLayout
from megalite.training.loss_terms import counted, total_counts, total_sums
from megalite.training.routing_recorder import RoutingRecorder
from tests.distributed.layout_expected import on_ranks
from tests.harness.rank_pool import RankPools

LENGTH, BATCH, HIDDEN, EXPERTS, TOPK = 16, 4, 8, 4, 2
CAPACITY = 4  # with a factor of 0.5
TABLES: dict[str, ChunkTable] = {"zigzag": ((0, 3), (1, 2)), "later first": ((2, 3), (0, 1)), "mixed": ((1, 3), (0, 2))}
"""Chunks of two context-parallel ranks."""
SPLITS = {2: (2, 1), 4: (2, 2)}
"""Context- and tensor-parallel ranks, by number of ranks."""


class Routed(NamedTuple):
    """Results of a rank's routers for its tokens: `kept` is [own tokens, batch, topk] of each micro-batch."""

    places: list[Tensor]
    kept: list[Tensor]
    counts: dict[str, float]
    sums: dict[str, float]


def model(policy: str) -> ModelConfig:
    return ModelConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        init_method_std=0.5,
        num_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_load_balancing_type=("aux_loss", "seq_aux_loss"),
        moe_aux_loss_coeff=(0.1, 0.1),
        moe_expert_capacity_factor=0.5,
        moe_token_drop_policy=policy,  # type: ignore[arg-type]
    )


def routed(policy: str, tables: list[str], folder: Path, equal: bool) -> Routed:
    """Route a micro-batch for each table, count it, and record it."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    cp, tp = SPLITS.get(size, (1, 1))
    mesh = ParallelMesh(rank=rank, world_size=size, context_parallel_size=cp, tensor_parallel_size=tp)
    context = ParallelContext(mesh, sequence_parallel=tp > 1, dtype=torch.float64)
    config = model(policy)
    router = Router(config, context, 0)
    initialize(router, 1)
    if equal:
        router.weight.data.zero_()
    # Of the four samples, one is whole, one ends in its second chunk, one after its first token, and one is padding.
    padding = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [6], [1], [0]])
    terms = MoE.loss_terms(config, context)
    micro_batches, places, kept, sums = [], [], [], dict.fromkeys((term.name for term in terms), torch.tensor(0.0))
    for number, table in enumerate(tables):
        layout = SequenceLayout.cut(LENGTH, TABLES[table] if cp > 1 else ((0,),), mesh.coordinate("cp"))
        rows = layout.part(mesh.coordinate("tp"), tp)
        places.append(torch.cat([torch.arange(run.start, run.stop) for run in rows]))
        generator = torch.Generator().manual_seed(number)
        hidden = torch.randn(LENGTH, BATCH, HIDDEN, generator=generator, dtype=torch.float64)[places[-1]]
        own = layout.own(padding) if number == 0 else None  # the other micro-batches have no padding
        key, choices = RandomKey(1, tuple(range(BATCH * number, BATCH * (number + 1)))), dict[int, Tensor]()
        mine = None if own is None else padding.t()[places[-1]]
        routing = router(hidden, LayerContext(None, None, {}, key, layout, rows, padding=mine, choices=choices))
        kept.append(routing.experts.view(len(hidden), BATCH, TOPK))
        tokens = layout.own(torch.zeros(BATCH, LENGTH, dtype=torch.int64))
        micro_batches.append(
            MicroBatch(tokens, tokens, None, None, None, key, layout, padding=own, choices=choices),
        )
        sums = {name: sums[name] + routing.terms[name].detach() for name in sums}
    counts = total_counts(terms, counted(terms, micro_batches, mesh.device), mesh)
    records = RoutingRecords(folder, (True,), EXPERTS, TOPK)
    RoutingRecorder(records, mesh, mesh.group(*context.sample_axes)).end_step(micro_batches)
    totals = total_sums(terms, sums, mesh)
    return Routed(places, kept, {n: float(c) for n, c in counts.items()}, {n: float(s) for n, s in totals.items()})


@pytest.mark.parametrize("size", SPLITS)
@pytest.mark.parametrize(("policy", "equal"), [("probs", False), ("position", False), ("probs", True)])
def test_parts_of_samples_are_routed_as_whole_ones(
    size: int, policy: str, equal: bool, rank_pools: RankPools, tmp_path: Path
) -> None:
    """Keep of equal weights the first ones in the sample, wherever its chunks are."""
    tables = list(TABLES)
    (alone,) = on_ranks(rank_pools, 1, routed, policy, tables, tmp_path / "alone", equal)
    ranks = on_ranks(rank_pools, size, routed, policy, tables, tmp_path / "ranks", equal)
    for number, whole in enumerate(alone.kept):
        found = torch.full_like(whole, -2)
        for rank in ranks:
            found[rank.places[number]] = rank.kept[number]
        assert torch.equal(found, whole)
        assert ((whole >= 0).sum() < whole.numel()).item()
        if equal:
            assert (whole[:CAPACITY, 0] == torch.tensor([0, 1])).all()
            assert (whole[CAPACITY:, 0] == -1).all()
    assert alone.counts["load_balancing_loss"] == len(tables)
    assert alone.counts["seq_load_balancing_loss"] == len(tables) * BATCH - 1
    for rank in ranks:
        assert rank.counts == alone.counts
        assert rank.sums == pytest.approx(alone.sums, rel=1e-12)
    names = [f"{sample:012d}.npy" for sample in range(len(tables) * BATCH)]
    for name in names:
        assert (tmp_path / "ranks" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()

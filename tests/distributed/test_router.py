"""Routers whose samples are split over ranks choose, drop, count and record as one that has whole samples.

Even choices are also compared with those of Megatron-LM's router, from the wheel megatron-core 0.16.1.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.data.routing_records import RoutingRecords
from megalite.model.batch import LayerContext, MicroBatch
from megalite.model.layer_kinds import LAYER_KINDS
from megalite.model.router import Router
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import ChunkTable, SequenceLayout
from megalite.tasks.routing_recorder import RoutingRecorder
from megalite.training.loss_terms import counted, total_counts, total_sums
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


LOSSES = {"moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"), "moe_aux_loss_coeff": (0.1, 0.1)}
EVEN = {"moe_router_load_balancing_type": ("sinkhorn",), "moe_router_pre_softmax": True}


def model(**options: Any) -> ModelConfig:
    plain = {"init_method_std": 0.5, "num_experts": EXPERTS, "moe_router_topk": TOPK}
    return ModelConfig(1, HIDDEN, 2, **plain | options)


def routed(options: dict[str, Any], tables: list[str], folder: Path, equal: bool = False) -> Routed:
    """Route a micro-batch for each table, count it, and record it."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    cp, tp = SPLITS.get(size, (1, 1))
    mesh = ParallelMesh(rank=rank, world_size=size, context_parallel_size=cp, tensor_parallel_size=tp)
    context = ParallelContext(mesh, sequence_parallel=tp > 1, dtype=torch.float64)
    config = model(**options)
    router = Router(config, context, 0)
    initialize(router, 1)
    if equal:
        router.weight.data.zero_()
    # Of the four samples, one is whole, one ends in its second chunk, one after its first token, and one is padding.
    padding = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [6], [1], [0]])
    terms = LAYER_KINDS["moe"].loss_terms(config, context)
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
    tables, options = list(TABLES), LOSSES | {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": policy}
    (alone,) = on_ranks(rank_pools, 1, routed, options, tables, tmp_path / "alone", equal)
    ranks = on_ranks(rank_pools, size, routed, options, tables, tmp_path / "ranks", equal)
    assert_same(alone, ranks, tmp_path)
    for whole in alone.kept:
        assert ((whole >= 0).sum() < whole.numel()).item()
        if equal:
            assert (whole[:CAPACITY, 0] == torch.tensor([0, 1])).all()
            assert (whole[CAPACITY:, 0] == -1).all()
    assert alone.counts["load_balancing_loss"] == len(tables)
    assert alone.counts["seq_load_balancing_loss"] == len(tables) * BATCH - 1


def assert_same(alone: Routed, ranks: list[Routed], folder: Path) -> None:
    """Assert that the ranks' routers did what one did alone, and recorded the same."""
    for number, whole in enumerate(alone.kept):
        found = torch.full_like(whole, -2)
        for rank in ranks:
            found[rank.places[number]] = rank.kept[number]
        assert torch.equal(found, whole)
    for rank in ranks:
        assert rank.counts == alone.counts
        assert rank.sums == pytest.approx(alone.sums, rel=1e-12)
    names = [f"{sample:012d}.npy" for sample in range(len(alone.kept) * BATCH)]
    for name in names:
        assert (folder / "ranks" / name).read_bytes() == (folder / "alone" / name).read_bytes()


@pytest.mark.parametrize("size", SPLITS)
def test_choices_are_even_over_the_ranks_that_share_samples(size: int, rank_pools: RankPools, tmp_path: Path) -> None:
    (alone,) = on_ranks(rank_pools, 1, routed, EVEN, list(TABLES), tmp_path / "alone")
    assert_same(alone, on_ranks(rank_pools, size, routed, EVEN, list(TABLES), tmp_path / "ranks"), tmp_path)
    (uneven,) = on_ranks(rank_pools, 1, routed, LOSSES, list(TABLES), tmp_path / "uneven")
    for evened, by_logit in zip(alone.kept, uneven.kept, strict=True):
        assert not torch.equal(evened, by_logit)


def chosen_by_megatron(logits: Tensor, topk: int, training: bool) -> Tensor:
    """Return the weights that Megatron-LM's router gives to all experts, zero for those that are not chosen."""
    from megatron.core.transformer.moe.router import TopKRouter

    router = SimpleNamespace(topk=topk, training=training, config=SimpleNamespace(moe_aux_loss_coeff=0))
    weights: Tensor = TopKRouter.sinkhorn_load_balancing(router, logits)[0]
    return weights


@pytest.mark.wide
@pytest.mark.parametrize(
    ("std", "topk", "training"),
    [
        pytest.param(std, topk, training, marks=[pytest.mark.wide] * ((number + topk + training) % 2))  # in turn
        for number, std in enumerate((0.1, 0.5, 2.0))
        for topk in (1, 2)
        for training in (True, False)
    ],
)
def test_even_choices_and_their_weights_are_megatrons(
    std: float, topk: int, training: bool, rank_pools: RankPools
) -> None:
    score = {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": False} if topk == 1 else {}
    config = model(**EVEN | score | {"moe_router_topk": topk, "init_method_std": std})
    router = Router(config, ParallelContext(ParallelMesh()), 0)
    initialize(router, 1)
    generator, layout = torch.Generator().manual_seed(1), SequenceLayout.whole(LENGTH)
    hidden = torch.randn(LENGTH, BATCH, HIDDEN, generator=generator)
    routing = router.train(training)(hidden, LayerContext(None, None, {}, RandomKey(1, ()), layout, layout.runs))
    found = torch.zeros(LENGTH * BATCH, EXPERTS).scatter(1, routing.experts, routing.weights.detach())
    logits = (hidden @ router.weight.detach().t()).flatten(0, 1)
    (expected,) = rank_pools(1).run(chosen_by_megatron, logits, topk, training)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

"""Interleaved 1F1B is Megatron-LM's, for the sizes that Megatron-LM accepts."""

from __future__ import annotations

from megalite.pipeline.schedules import SCHEDULES, orders_of
from megalite.pipeline.stages import Stages
from tests.distributed import megatron_schedules
from tests.harness.rank_pool import RankPools


def test_orders_are_megatrons(rank_pools: RankPools) -> None:
    """Megatron-LM refuses a group larger than the number of micro-batches, and a last one smaller than the pipeline."""
    sizes = [
        (ranks, chunks, micro_batches, group)
        for ranks in (2, 3, 4, 7, 8)
        for chunks in (2, 3, 4)
        for micro_batches in range(ranks, 33)
        for group in (ranks, ranks + 1, 2 * ranks)
        if group <= micro_batches and (micro_batches % group == 0 or micro_batches % group >= ranks)
    ]
    (expected,) = rank_pools(1).run(megatron_schedules.orders, sizes)
    for (ranks, chunks, micro_batches, group), theirs in zip(sizes, expected, strict=True):
        ours = orders_of(SCHEDULES["interleaved-1f1b"], Stages(ranks, chunks), micro_batches, group)
        found = [[(action.kind, action.micro_batch, action.chunk) for action in order] for order in ours]
        assert found == theirs, (ranks, chunks, micro_batches, group)

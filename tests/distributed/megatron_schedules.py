"""Megatron-LM's own order of interleaved 1F1B, from the wheel that `megatron_data` describes."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

Order = list[tuple[str, int, int]]
"""Actions: F or B, the micro-batch and the chunk."""


def orders(sizes: list[tuple[int, int, int, int]]) -> list[list[Order]]:
    """Return each rank's order for each (ranks, chunks, micro-batches, group): warm-up, alternating F and B, the
    rest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    def order(rank: int, ranks: int, chunks: int, micro_batches: int, group: int) -> Order:
        pipeline = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
        communicator = SimpleNamespace(pp_group=pipeline, virtual_pipeline_model_parallel_size=chunks)
        _, _, warm_up, remaining = get_pp_rank_microbatches(micro_batches, chunks, group, p2p_communicator=communicator)
        table = get_schedule_table(micro_batches, chunks, group)
        forward = [("F", m, chunk) for m, chunk in table]
        backward = [("B", m, chunks - 1 - chunk) for m, chunk in table]
        in_turn = [action for pair in zip(forward[warm_up:], backward, strict=False) for action in pair]
        return [*forward[:warm_up], *in_turn, *backward[remaining:]]

    return [[order(rank, *size) for rank in range(size[0])] for size in sizes]

"""Measurement of a ring by the check for machines with GPUs, on CPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.gpu_context import blocks_in_turn, time_ring
from megalite.parallel.key_value_exchange import Ring
from megalite.parallel.mesh import ParallelMesh
from tests.harness.rank_pool import RankPools


def blocks_of(ranks: int) -> tuple[list[float], list[float], dict[str, float]]:
    """Return the blocks of a ring, those of the ring without overlap, and the times of both."""
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=ranks, context_parallel_size=ranks)
    ring, own = Ring(mesh.group("cp")), torch.full((2, 1, 1, 1, 1), float(dist.get_rank()))
    usual, in_turn = ([block[0].item() for block in blocks] for blocks in (ring.blocks(own), blocks_in_turn(ring, own)))
    return usual, in_turn, time_ring(mesh, 96, torch.float32, repeats=2)


def test_a_ring_without_overlap_passes_the_same_blocks(rank_pools: RankPools) -> None:
    for ranks in (2, 3):
        for rank, (usual, in_turn, seconds) in enumerate(rank_pools(ranks).run(blocks_of, ranks)):
            assert usual == in_turn == [(rank - number) % ranks for number in range(ranks)]
            assert seconds.keys() == {"ring", "ring without overlap", "attention alone"}
            assert all(value > 0 for value in seconds.values())

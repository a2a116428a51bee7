"""Dynamic loss scale over ranks when only one overflows (docs/invariants.md: I12)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megalite.config.optimizer import OptimizerConfig
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.learning_rate import Rates
from megalite.optim.loss_scale import LossScale
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from tests.distributed.layout_cell import Cell, model_config
from tests.distributed.layout_run import accumulate_gradients, local_micro_batches, plant_infinity
from tests.harness.rank_pool import RankPools

OVERFLOWS = (1, 2, 3, 6)  # steps
STEPS = 9
START = LossScale.dynamic(2.0**6, 1.0, 2, 2)


def trajectory(tp: int, stage: int) -> list[tuple[float, bool, int]]:
    """Return each step's loss scale, whether it was skipped, and the number of updates so far; the last rank
    overflows."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = ParallelMesh(rank=rank, world_size=world_size, tensor_parallel_size=tp)
    cell = Cell(family="llama", tied=False, tp=tp, dp=world_size // tp, dtype="float16")
    network = GPT(model_config(cell), mesh, dtype=torch.float16)
    initialize(network, seed=1)
    options = DataParallel(torch.float32, stage)
    optimizer = make_optimizer([network], mesh, OptimizerConfig(lr=0.01), options, blocks=[network.blocks()])
    scale, seen = START, []
    for step in range(STEPS):
        if rank == world_size - 1:
            plant_infinity(network, active=step in OVERFLOWS)
        micro_batches = list(local_micro_batches(cell, step, mesh.coordinate("dp")))
        accumulate_gradients(optimizer, network, micro_batches, scale.value / 64)
        update = optimizer.step(Rates(0.01, 0.01, 0.0), scale.value)
        seen.append((scale.value, update.skipped, optimizer.steps))
        scale = scale.after(overflow=update.skipped)
    return seen


@pytest.mark.parametrize(
    ("tp", "stage"),
    [(1, 3), *(pytest.param(*case, marks=pytest.mark.wide) for case in ((2, 0), (1, 0), (1, 1), (1, 2)))],
)
def test_all_ranks_follow_the_one_that_overflows(tp: int, stage: int, rank_pools: RankPools) -> None:
    wanted, scale, updates = [], START, 0
    for step in range(STEPS):
        overflow = step in OVERFLOWS
        updates += not overflow
        wanted.append((scale.value, overflow, updates))
        scale = scale.after(overflow=overflow)
    assert len({value for value, *_ in wanted}) > 2
    for seen in rank_pools(2).run(trajectory, tp, stage):
        assert seen == wanted

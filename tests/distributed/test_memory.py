"""What each ZeRO stage keeps between uses, in bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megalite.config.optimizer import OptimizerConfig
from megalite.model.gpt import GPT
from megalite.optim.buckets import REDUCTIONS_IN_FLIGHT, DataParallel
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.pipeline import engine, schedules
from tests.distributed.layout_cell import Cell, model_config
from tests.distributed.layout_run import local_micro_batches
from tests.harness.rank_pool import RankPools

NARROW = OptimizerConfig(
    lr=0.01, use_precision_aware_optimizer=True, main_params_dtype="fp16", exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"
)


def kept(stage: int, overlap: bool, narrow: bool) -> dict[str, float]:
    """Bytes an element, on a rank after a step in bf16: parameters, gradients, optimizer; and gradients at the most."""
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size())
    cell = Cell(family="llama", tied=False, dp=2, dtype="bfloat16")
    network = GPT(model_config(cell), mesh, dtype=torch.bfloat16)
    initialize(network, seed=1)
    options = DataParallel(
        torch.bfloat16 if narrow else torch.float32, stage, overlap_reduce=overlap, overlap_gather=overlap and stage > 0
    )
    optimizer = make_optimizer(
        network, mesh, NARROW if narrow else OptimizerConfig(lr=0.01), options, blocks=network.blocks()
    )
    micro_batches = list(local_micro_batches(cell, 0, mesh.coordinate("dp")))
    optimizer.begin_step(len(micro_batches))
    engine.run(schedules.no_pipelining(len(micro_batches)), network, micro_batches, 1.0)
    sizes = [bucket.gradients.untyped_storage().size() for bucket in optimizer.buckets]
    alive = sum(sizes)
    largest = sum(sorted(bucket.gradients.nbytes for bucket in optimizer.buckets)[-REDUCTIONS_IN_FLIGHT:])
    optimizer.step(Rates(0.01, 0.01, 0.01))
    optimizer.finish_parameter_gather()
    elements = sum(bucket.parameters.numel() for bucket in optimizer.buckets)

    def size(tensors: list[torch.Tensor]) -> float:
        storages = {t.untyped_storage()._cdata: t.untyped_storage().size() for t in tensors}
        return sum(storages.values()) / elements

    buckets, shards = optimizer.buckets, optimizer.shards
    return {
        "parameters": size([t for b in buckets for t in (b.parameters, b.parameter_shard)]),
        "gradients": size([t for b in buckets for t in (b.gradients, b.gradient_shard)]),
        "optimizer": size([t for s in shards for t in (s.master, *(t for run in s.runs for t in run.state.values()))]),
        "alive beyond two buckets": alive - largest,
    }


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "optimizer"), [(0, 2, 4, 12), (1, 2, 4, 6), (2, 2, 2, 6), (3, 1, 2, 6)]
)
def test_memory_is_the_formulas(
    stage: int, parameters: float, gradients: float, optimizer: float, overlap: bool, rank_pools: RankPools
) -> None:
    """bf16 with fp32 gradients, masters and moments on two ranks: 6 + 12 / 2 bytes a parameter under ZeRO 1."""
    for found in rank_pools(2).run(kept, stage, overlap, False):
        assert found["parameters"] == parameters
        assert found["gradients"] == gradients
        assert found["optimizer"] == optimizer
        if stage >= 2:
            assert found["alive beyond two buckets"] <= 0


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "optimizer"), [(0, 2, 2, 6), (1, 2, 2, 3), (2, 2, 1, 3), (3, 1, 1, 3)]
)
def test_a_precision_aware_optimizer_keeps_half(
    stage: int, parameters: float, gradients: float, optimizer: float, rank_pools: RankPools
) -> None:
    """Gradients, masters and both moments in 2 bytes each: 4 + 6 / 2 bytes a parameter under ZeRO 1."""
    for found in rank_pools(2).run(kept, stage, False, True):
        assert (found["parameters"], found["gradients"], found["optimizer"]) == (parameters, gradients, optimizer)

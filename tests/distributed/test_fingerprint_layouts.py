"""Fingerprints of frozen weights on ranks: those of one process, whatever boxes the ranks have."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megalite.checkpoint.fingerprint import fingerprint
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.parallel.mesh import ParallelMesh
from megalite.training.data import open_data
from tests.distributed.test_trainer import FLAGS
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools

NETWORK = "--num-layers 4 --num-experts 4 --lora-rank 2"
LAYOUTS = {
    "heads": "--tp 2 --sequence-parallel --use-distributed-optimizer",
    "stages and experts": "--pp 2 --ep 2",
    "experts in parts": "--ep 2 --expert-tensor-parallel-size 2 --tp 2 --sequence-parallel",
    "shards of weights": "--data-parallel-sharding-strategy optim_grads_params",
}


def found(flags: str) -> str:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = resolve(parse_arguments(f"{FLAGS} {NETWORK} {flags}".split()).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    return fingerprint(gpt_trainer(config, open_data(config), mesh).optimizer, mesh)


@pytest.mark.wide
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_fingerprint_of_one_process(layout: str, rank_pools: RankPools) -> None:
    assert {*rank_pools(4).run(found, LAYOUTS[layout])} == {found("")}

"""Checkpoints of runs that communicate less: a resumed run has the bits of one that was not stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint import Candidates, read_manifest
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.parallel.mesh import ParallelMesh
from megalite.training.data import open_data
from megalite.training.display import Display
from megalite.training.gpt_task import gpt_trainer
from megalite.training.resume import ResumePoint
from megalite.training.trainer import Trainer
from tests.distributed.test_compression import SGD
from tests.distributed.test_local_update import FLAGS
from tests.harness.close import assert_bits_equal
from tests.harness.rank_pool import RankPools


def trainer_of(flags: str, folder: Path) -> Trainer:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = resolve(parse_arguments(f"{FLAGS} --save {folder} {flags}".split()).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    return gpt_trainer(config, open_data(config), mesh, folder)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return all that this rank keeps."""
    optimizer = trainer.optimizer
    found = {f"{n}": b.parameter_shard.clone() for n, b in enumerate(optimizer.buckets)}
    for number, shard in enumerate(optimizer.shards):
        found |= {f"shard {number} {n}": values.clone() for n, values in enumerate(shard.tensors())}
    for state, buckets in optimizer.bucket_states.items():
        flats = [flat for bucket in buckets for flat in bucket]
        found |= {f"{state.name} {number}": flat.clone() for number, flat in enumerate(flats)}
    return found | {name: values.clone() for name, values in optimizer.rank_states.items()}


def train(flags: str, folder: Path, steps: int, load: Path | None = None, after: int = 3) -> tuple[list[float], Any]:
    """Train, save, and go on. Return the losses after the checkpoint, and all that this rank keeps in the end."""
    trainer = trainer_of(flags, folder)
    if load is not None:
        path = load / f"iter_{steps:07}"
        trainer.load(path, read_manifest(path), ResumePoint(Candidates()))
    with trainer.loader:
        if load is None:
            for _ in range(steps):
                trainer.step()
            trainer.save(Display(9, 1, start_iteration=0, enabled=False), last=True)
        losses = [trainer.step().loss for _ in range(after)]
    assert trainer.checkpoints is not None
    trainer.checkpoints.close()
    return losses, state_of(trainer)


LOCAL = "--local-update diloco --local-update-period 3"
RUNS = {
    "int8": (2, "--gradient-compression int8", 2),
    "randomk": (2, "--gradient-compression randomk --compression-ratio 0.1 --use-distributed-optimizer", 2),
    "dgc": (2, f"{SGD} --gradient-compression dgc --compression-ratio 0.1", 2),
    "onebit-adam": (2, "--clip-grad 0 --gradient-compression onebit-adam --compression-warmup-iters 2", 3),
    "powersgd": (4, "--gradient-compression powersgd --compression-rank 2 --tp 2 --sequence-parallel", 2),
    "stages": (4, "--gradient-compression topk --compression-ratio 0.1 --pp 2", 2),
    "sites": (4, "--gradient-compression int8 signsgd --sites 2", 2),
    "diloco": (2, f"{LOCAL} --gradient-compression int8", 4),
    "under way": (2, f"{LOCAL} --local-update-delay 2 --local-update-mixing 0.5", 4),
    "easgd": (2, "--local-update easgd --local-update-period 2", 3),
    "fedavg": (2, "--local-update fedavg --local-update-period 3", 4),
    "sites in bf16": (4, f"{LOCAL} --sites 2 --data-parallel-sharding-strategy optim_grads_params --bf16 --no-fp64", 4),
    "fp16": (2, "--gradient-compression int8 --fp16 --no-fp64 --initial-loss-scale 65536", 2),
    "heads": (4, f"{LOCAL} --tp 2 --sequence-parallel", 4),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_resumed_run_has_the_same_bits(case: str, rank_pools: RankPools, tmp_path: Path) -> None:
    ranks, flags, steps = RUNS[case]
    through = rank_pools(ranks).run(train, flags, tmp_path / "a", steps)
    resumed = rank_pools(ranks).run(train, flags, tmp_path / "b", steps, tmp_path / "a")
    for (losses, kept), (again, found) in zip(through, resumed, strict=True):
        assert losses == again
        assert kept.keys() == found.keys()
        for name, values in kept.items():
            assert_bits_equal(found[name], values, name)

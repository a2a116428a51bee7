"""Checkpoints of runs that communicate less: a resumed run has the bits of one that was not stopped."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint import Candidates, load, read_manifest
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.extras.synchronization.low_rank import LowRankReduction
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.training.data import open_data
from megalite.training.display import Display
from megalite.training.resume import ResumePoint
from megalite.training.trainer import Trainer
from tests.extras.synchronization.test_compression import SGD
from tests.extras.synchronization.test_local_update import FLAGS
from tests.harness.checkpoints import read
from tests.harness.close import assert_bits_equal, assert_number_close
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools


def trainer_of(flags: str, folder: Path, base: str = FLAGS) -> Trainer:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = resolve(parse_arguments(f"{base} --save {folder} {flags}".split()).config, size)
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


def train(
    flags: str, folder: Path, steps: int, source: Path | None = None, after: int = 3, *, optimizer: bool = True
) -> tuple[list[float], Any]:
    """Train, save, and go on. Return the losses after the checkpoint, and all that this rank keeps in the end."""
    trainer = trainer_of(flags, folder)
    if source is not None:
        path = source / f"iter_{steps:07}"
        trainer.load(path, read_manifest(path), ResumePoint(Candidates(), optimizer=optimizer))
    with trainer.loader:
        if source is None:
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
    "within and between": (4, f"{LOCAL} --sites 2 --gradient-compression int8 topk", 4),
    "easgd": (2, "--local-update easgd --local-update-period 2", 3),
    "fedavg": (2, "--local-update fedavg --local-update-period 3", 4),
    "sites in bf16": (4, f"{LOCAL} --sites 2 --data-parallel-sharding-strategy optim_grads_params --bf16 --no-fp64", 4),
    "masters in fp16": (
        2,
        f"{LOCAL} --gradient-compression int8 --bf16 --no-fp64 --use-distributed-optimizer --sites 2 "
        "--use-precision-aware-optimizer --main-params-dtype fp16",
        4,
    ),
    "fragments": (2, f"{LOCAL} --local-update-fragments 3 --local-update-delay 1", 4),
    "fp16": (2, "--gradient-compression int8 --fp16 --no-fp64 --initial-loss-scale 65536", 2),
    "heads": (4, f"{LOCAL} --tp 2 --sequence-parallel", 4),
}


@pytest.mark.wide_except("onebit-adam", "powersgd", "sites", "diloco", "under way")
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


def vectors_left_out(flags: str, folder: Path, source: Path) -> list[float]:
    """Return the largest residual of a vector after a load, and after the next step."""
    trainer = trainer_of(flags, folder)
    trainer.load(source, read_manifest(source), ResumePoint(Candidates()))
    found = []
    with trainer.loader:
        for _ in range(2):
            left = [
                accumulator.reduction.state["residual"][slot.start : slot.stop].abs().max().item()
                for bucket in trainer.optimizer.buckets
                for accumulator in bucket.accumulators
                if isinstance(accumulator.reduction, LowRankReduction)
                for slot in bucket.layout.slots
                if slot.parameter.dim() < 2
            ]
            found.append(max(left))
            trainer.step()
    assert trainer.checkpoints is not None
    trainer.checkpoints.close()
    return found


def test_powersgd_sends_what_another_compression_has_left_of_vectors_once(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    rank_pools(2).run(train, "--gradient-compression int8", tmp_path / "a", 2)
    flags = "--gradient-compression powersgd --compression-rank 2"
    for before, after in rank_pools(2).run(vectors_left_out, flags, tmp_path / "b", tmp_path / "a" / "iter_0000002"):
        assert before > 0.0
        assert after == 0.0


def parameters(kept: dict[str, Tensor]) -> list[Tensor]:
    return [values for name, values in kept.items() if name.isdigit()]


def test_replicas_without_their_state_begin_alike(rank_pools: RankPools, tmp_path: Path) -> None:
    """Replicas that load no state of the optimizer begin with the anchor, and stay together."""
    rank_pools(2).run(train, LOCAL, tmp_path / "a", 4)
    run = partial(train, LOCAL, source=tmp_path / "a", optimizer=False)
    for after in (0, 5):
        one, other = rank_pools(2).run(run, tmp_path / "b", 4, after=after)
        for ours, theirs in zip(parameters(one[1]), parameters(other[1]), strict=True):
            assert_bits_equal(ours, theirs)
    saved = read(tmp_path / "a" / "iter_0000004")
    assert not torch.equal(*saved["replica/model/final_norm.weight"])
    assert torch.equal(saved["model/final_norm.weight"], saved["optimizer/anchor/final_norm.weight"])


def test_weights_of_the_warm_up_are_those_of_the_model(rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools(2).run(train, f"{LOCAL} --local-update-warmup-iters 6", tmp_path, 4)
    saved = read(tmp_path / "iter_0000004")
    for name, values in saved.items():
        if name.startswith("replica/model/"):
            assert torch.equal(values[0], values[1])
            assert torch.equal(values[0], saved[name.removeprefix("replica/")])


def test_a_plain_run_takes_the_mean_and_a_reader_the_anchor(rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools(2).run(train, LOCAL, tmp_path / "a", 4)
    saved = read(tmp_path / "a" / "iter_0000004")
    train("", tmp_path / "b", 4, tmp_path / "a", 0)
    trainer = trainer_of("", tmp_path / "c")
    path = tmp_path / "a" / "iter_0000004"
    for optimizer, wanted in ((trainer.optimizer, "replica/model/"), (None, "model/")):
        load(path, trainer.network, optimizer, trainer.mesh)
        for parameter, piece in named_pieces(trainer.network):
            values = saved[wanted + piece.tensor.name]
            found = piece.view(parameter.detach())
            assert torch.equal(found, values.sum(0) / 2 if optimizer is not None else values)


def test_tokens_follow_replicas_to_another_layout(rank_pools: RankPools, tmp_path: Path) -> None:
    flags = "--local-update fedavg --local-update-period 3"
    through = rank_pools(2).run(train, flags, tmp_path / "a", 4)
    rank_pools(4).run(train, f"{flags} --tp 2", tmp_path / "b", 4, tmp_path / "a")
    resumed = rank_pools(4).run(train, f"{flags} --tp 2", tmp_path / "c", 4, tmp_path / "a")
    for (losses, _), (again, _) in zip(through, resumed, strict=False):
        for loss, other in zip(losses[:2], again[:2], strict=True):  # after the exchange the weighing differs
            assert_number_close(other, loss, "loss", 1e-9)


def test_nothing_ends_that_has_not_begun(rank_pools: RankPools, tmp_path: Path) -> None:
    """A plain checkpoint at a step at which an exchange of a local run would be under way."""
    rank_pools(2).run(train, "", tmp_path / "a", 4)
    delayed = f"{LOCAL} --local-update-delay 2"
    for losses, _ in rank_pools(2).run(train, delayed, tmp_path / "b", 4, tmp_path / "a"):
        plain = rank_pools(2).run(train, LOCAL.replace("3", "9"), tmp_path / "c", 4, tmp_path / "a")
        assert losses[:2] == plain[0][0][:2]

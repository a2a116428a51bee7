"""Runs whose data-parallel ranks take unequal shares: data, evaluations, measured shares, resuming."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megalite
from megalite import checkpoint
from megalite.config import RunConfig
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError
from megalite.parallel.mesh import ParallelMesh
from megalite.run.evaluation import evaluate
from megalite.training.data import open_data
from megalite.training.display import Display
from megalite.training.ledger import Decision
from megalite.training.resume import find_resume_point
from megalite.training.unequal_shares import SECTION, ComputeTimes
from tests.distributed.layout_expected import assemble
from tests.distributed.layout_run import Held, held
from tests.harness.close import assert_number_close
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools
from tests.harness.unsharded import unsharded_parameters

FLAGS = (
    "--fp64 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 31 --micro-batch-size 1 --global-batch-size 12 "
    "--train-iters 4 --lr 0.01 --eval-iters 2 --seed 5 --num-workers 1"
)


@dataclass(frozen=True)
class OfRank:
    losses: list[float]
    validation: float
    samples: list[list[int]]
    """Samples of this rank in each step."""
    weights: list[Held]
    shares: tuple[int, ...]
    notes: tuple[str, ...]
    decisions: list[Decision | None]


def train(flags: str, steps: int, *, save_at: int = 0, measured: dict[int, float] | None = None) -> OfRank:
    """Train on this rank. `measured`: measured seconds per micro-batch by rank, in place of real ones."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = resolve(parse_arguments(f"{FLAGS} {flags}".split()).config, world_size)
    assert isinstance(config, RunConfig)
    mesh = ParallelMesh(
        rank=rank, world_size=world_size, pipeline_parallel_size=config.parallel.pipeline_model_parallel_size
    )
    directory = None if config.checkpoint.save is None else Path(config.checkpoint.save)
    trainer = gpt_trainer(config, open_data(config), mesh, directory)
    point = find_resume_point(config.checkpoint, mesh)
    for path in point.candidates.paths[:1]:
        trainer.load(path, checkpoint.check_whole(path, mesh), point)
    losses, samples, decisions = [], [], []
    taken = mock.patch.object(ComputeTimes, "take", return_value=(measured or {}).get(rank, 0.0))
    with trainer.loader, taken:
        while trainer.iteration < steps:
            micro_batches = trainer.next_micro_batches()
            samples.append([sample for each in micro_batches for sample in each.key.samples])
            losses.append(trainer.step(micro_batches).losses["lm_loss"])
            if trainer.iteration == save_at:
                with Display(None, 1, enabled=False) as display:
                    decisions.append(trainer.balance())
                    trainer.save(display, last=False)
    validation = evaluate(trainer)
    assert validation is not None
    with unsharded_parameters(trainer.optimizer):
        weights = held(trainer.network, mesh, lambda parameter: parameter)
    shares = tuple(getattr(trainer.shares, "shares", ()))
    return OfRank(losses, validation["lm_loss"], samples, weights, shares, trainer.loaded.notes, decisions)


def digests(ranks: list[OfRank]) -> list[list[bytes]]:
    return [[each.digest for each in rank.weights] for rank in ranks]


@pytest.mark.wide_except("1:4:1-3")
@pytest.mark.parametrize(("shares", "ranks"), [("3:1", 2), ("1:4:1", 3)])
def test_a_run_is_that_of_one_rank(shares: str, ranks: int, rank_pools: RankPools) -> None:
    """Training and evaluations see the same samples, each once, whoever takes them."""
    (alone,) = rank_pools(1).run(train, "", 3)
    found = rank_pools(ranks).run(train, f"--data-parallel-shares {shares} --overlap-grad-reduce", 3)
    weights = [int(share) for share in shares.split(":")]
    for step in range(3):
        parts = [rank.samples[step] for rank in found]
        assert [len(part) for part in parts] == [12 * weight // sum(weights) for weight in weights]
        assert sorted(sample for part in parts for sample in part) == list(range(12 * step, 12 * step + 12))
    for rank in found:
        for own, wanted in zip(rank.losses, alone.losses, strict=True):
            assert_number_close(own, wanted, "loss")
        assert_number_close(rank.validation, alone.validation, "validation")
    whole, expected = assemble([rank.weights for rank in found]), assemble([alone.weights])
    for name, values in expected.items():
        torch.testing.assert_close(whole[name], values, rtol=1e-10, atol=1e-12, msg=name)


def test_measured_shares_change_at_saves_and_stand_in_the_checkpoint(tmp_path: Path, rank_pools: RankPools) -> None:
    """N + M steps are N, save, load and M, bit for bit, though the resumed run measures other times."""
    flags = f"--data-parallel-shares auto --save {tmp_path} --save-interval 2 --ckpt-format megalite"
    whole = rank_pools(2).run(train, flags, 4, save_at=2, measured={0: 1.0, 1: 2.0})
    assert [[len(samples) for samples in rank.samples] for rank in whole] == [[6, 6, 8, 8], [6, 6, 4, 4]]
    assert {rank.shares for rank in whole} == {(8, 4)}
    for rank in whole:
        (decision,) = rank.decisions
        assert decision is not None
        assert decision.why.startswith("8:4 micro-batches on the data-parallel ranks from the next step on")
        assert json.loads(json.dumps(decision.record(2)))["source"] == [0, 1]
    manifest = json.loads((tmp_path / "iter_0000002" / "manifest.json").read_text())
    assert manifest["config"][SECTION] == {"micro_batches": [8, 4]}
    resumed = rank_pools(2).run(train, f"{flags} --load {tmp_path}", 4, measured={0: 5.0, 1: 1.0})
    assert [rank.losses for rank in resumed] == [rank.losses[2:] for rank in whole]
    assert digests(resumed) == digests(whole)
    (other,) = rank_pools(1).run(train, f"--load {tmp_path}", 4)
    assert_number_close(other.losses[-1], whole[0].losses[-1], "loss")
    three = rank_pools(3).run(train, f"{flags} --load {tmp_path}", 3, measured={})
    assert three[0].shares == (4, 4, 4)
    assert any("begins with new shares" in note for note in three[0].notes)


@pytest.mark.wide
def test_times_within_two_percent_change_nothing(tmp_path: Path, rank_pools: RankPools) -> None:
    flags = f"--data-parallel-shares auto --save {tmp_path} --save-interval 2"
    found = rank_pools(2).run(train, flags, 3, save_at=2, measured={0: 1.0, 1: 1.15})
    assert found[0].shares == (6, 6)
    assert found[0].decisions == [None]


def test_shares_are_of_pipelines(tmp_path: Path, rank_pools: RankPools) -> None:
    """The slowest stage of a pipeline decides. Steps with the new shares are proved before they run."""
    flags = f"--data-parallel-shares auto --pp 2 --save {tmp_path} --save-interval 1"
    found = rank_pools(4).run(train, flags, 2, save_at=1, measured={0: 1.0, 1: 1.0, 2: 1.0, 3: 3.0})
    assert {rank.shares for rank in found} == {(9, 3)}
    (alone,) = rank_pools(1).run(train, "", 2)
    assert_number_close(found[0].losses[-1], alone.losses[-1], "loss")


def shares_after_real_steps() -> tuple[int, ...]:
    """Return the shares after three steps in which rank 1 needs 50 ms more for each forward."""
    rank = dist.get_rank()
    config = resolve(parse_arguments(f"{FLAGS} --data-parallel-shares auto --save unused".split()).config, 2)
    trainer = gpt_trainer(config, open_data(config), ParallelMesh(rank=rank, world_size=2))
    (network,) = trainer.chunks
    network.register_forward_pre_hook(lambda *_: time.sleep(0.05 * rank))
    with trainer.loader:
        for _ in range(3):
            trainer.step()
        trainer.balance()
    return tuple(getattr(trainer.shares, "shares", ()))


@pytest.mark.wide
def test_a_rank_that_is_really_slow_gets_less(rank_pools: RankPools) -> None:
    """50 ms are many times what this network takes, even on a busy machine."""
    first, second = rank_pools(2).run(shares_after_real_steps)
    assert first == second
    assert first[0] > first[1]


# ---------------------------------------------------------------------------------------------------- one's own models


class Rows(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(3.0, dtype=torch.float64) + index


class Stream(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield from (Rows()[index] for index in range(40))


def own_model(
    shares: str | None, *, stream: bool, zero: int = 0, save: Path | None = None
) -> tuple[list[float], float]:
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(3, 4, dtype=torch.float64), nn.Tanh(), nn.Linear(4, 1, dtype=torch.float64))
    run = megalite.Trainer(
        network,
        dataset=Stream() if stream else Rows(),
        valid_dataset=Rows(),
        loss=lambda output, batch: (output - batch.sum(-1, keepdim=True) / 40).square().mean(),
        optimizer=megalite.AdamW(lr=0.01),
        layout=megalite.Layout(zero=zero),
        save=save,
        precision="fp64",
        micro_batch_size=2,
        global_batch_size=12,
        quiet=True,
        watchdog=False,
        **({} if shares is None else {"data_parallel_shares": shares}),
    )
    losses = [run.step()["loss"] for _ in range(5)]
    if save is not None:
        run.save()
    found = run.evaluate()["loss"]
    run.close()
    return losses, found


@pytest.mark.wide
@pytest.mark.parametrize("stream", [False, True], ids=["places", "stream"])
def test_data_of_ones_own_are_dealt(stream: bool, rank_pools: RankPools) -> None:
    (alone,) = rank_pools(1).run(own_model, None, stream=stream)
    for losses, validation in rank_pools(2).run(own_model, "1:2", stream=stream):
        for own, wanted in zip(losses, alone[0], strict=True):
            assert_number_close(own, wanted, "loss")
        assert_number_close(validation, alone[1], "validation")


def saved_with_measured_times(save: Path) -> None:
    with mock.patch.object(ComputeTimes, "take", return_value=1.0 + dist.get_rank()):
        own_model("auto", stream=False, save=save)


def test_a_save_writes_new_shares_into_the_ledger(tmp_path: Path, rank_pools: RankPools) -> None:
    rank_pools(2).run(saved_with_measured_times, tmp_path)
    (line,) = map(json.loads, (tmp_path / "ledger.jsonl").read_text().splitlines())
    assert (line["step"], line["kind"], line["source"], line["outcome"]) == (5, "shares", [0, 1], "trained")
    assert line["why"].startswith("4:2 micro-batches on the data-parallel ranks")


def refused(zero: int) -> str:
    with pytest.raises(ConfigurationError) as caught:
        own_model("1:2", stream=False, zero=zero)
    return str(caught.value)


@pytest.mark.wide
def test_data_of_ones_own_have_no_empty_slots(rank_pools: RankPools) -> None:
    for message in rank_pools(2).run(refused, 2):
        assert "ranks 0 to 1 share collectives" in message
        assert "use ZeRO 0 or 1" in message

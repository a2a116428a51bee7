"""Copies in memory, loaded under another layout than the one of the ranks that took them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megalite.training.trainer import Trainer
from tests.extras.recovery.memory import Memory, born, train
from tests.extras.recovery.test_copies import hosts, memory
from tests.extras.recovery.test_copies_faults import EVERY, flip, own_steps
from tests.harness.close import assert_number_close
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

__all__ = ["memory"]
STEPS, AFTER = 3, 3
BITWISE = "--bf16 --no-fp64 --deterministic-mode --bitwise-elastic"
ZERO = "--data-parallel-sharding-strategy optim_grads"
RUNS = {
    "replicas": (4, "", 2, "", ""),
    "more replicas": (2, "", 4, "", ""),
    "shares": (2, "", 3, "", "--global-batch-size 6 --use-distributed-optimizer"),
    "heads": (4, "", 2, "", "--tp 2 --sequence-parallel --use-distributed-optimizer"),
    "stages": (4, "", 2, "", "--pp 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2"),
    "shards": (2, "", 4, "", ZERO),
    "shards of weights": (4, "", 2, "", f"{ZERO}_params"),
    "experts": (4, "", 2, "", "--num-experts 4 --ep 2 --use-distributed-optimizer"),
    "muon": (4, "", 2, "", "--optimizer muon"),
    "heads to replicas": (2, "--tp 2 --sequence-parallel", 2, "", ""),
    "stages and heads to shards": (4, "--pp 2 --tp 2", 3, f"{ZERO}_params", "--num-layers 4 --global-batch-size 6"),
    "shards to context": (2, ZERO, 4, "--cp 2 --use-distributed-optimizer", ""),
    "experts to stages": (4, "--ep 4", 2, "--pp 2", "--num-experts 4 --num-layers 4"),
    "recomputation": (4, "--tp 2 --pp 2", 2, "--pp 2 --recompute-activations", "--num-layers 4"),
    "bits": (4, "--pp 2", 3, ZERO, f"--num-layers 4 --global-batch-size 6 {BITWISE}"),
}  # fmt: skip
CORE = ("replicas", "stages and heads to shards", "experts to stages", "bits")


def with_ranks(memory: Memory, ranks: int) -> tuple[Memory, Memory]:
    """Return the slots of so many ranks, of which the first have those of `memory`, and the slots that are new."""
    new = Memory.of(max(0, ranks - len(memory.files)))
    return Memory((*memory.files, *new.files)[:ranks], os.getpid()), new


@pytest.mark.parametrize("name", wide_except(RUNS, CORE))
def test_a_run_continues_from_copies_of_other_ranks(
    name: str, memory: Any, rank_pools: RankPools, tmp_path: Path
) -> None:
    """Fewer ranks go on from what partners have kept of the others. The losses are those of a run without a break."""
    before, old_layout, now, new_layout, flags = RUNS[name]
    old_flags, new_flags = (f"{EVERY} {layout} {flags}" for layout in (old_layout, new_layout))
    files = memory(before)
    through = rank_pools(before).run(train, memory(before), hosts(before), tmp_path, old_flags, STEPS, AFTER)
    rank_pools(before).run(train, files, hosts(before), tmp_path, old_flags, STEPS, 0)
    fewer, new = with_ranks(files, now)
    ended = rank_pools(now).run(train, fewer, hosts(now), tmp_path, new_flags, 0, AFTER)
    new.close()
    assert ended[0][0] == (
        f"continues from the copies in memory of step {STEPS} (of {before} ranks, sent to those that need them now)"
    )
    for loss, wanted in zip(ended[0][2], through[0][2], strict=True):
        assert_number_close(loss, wanted, "loss")
    if "--bitwise-elastic" in flags:
        assert ended[0][2] == through[0][2]


def train_beside_a_base(
    memory: Memory, nodes: Sequence[str], folder: Path, flags: str, steps: int, after: int
) -> tuple[str | None, list[float]]:
    """Train adapters beside weights that are not those of the seed. Returns how a life began, and its losses."""

    def loaded(trainer: Trainer) -> None:  # as from a folder
        for parameter in trainer.network.parameters():
            if not parameter.requires_grad:
                parameter.data.mul_(1.25)

    life = born(memory, nodes, folder, f"{EVERY} --lora-rank 2 {flags}", begin=loaded)
    return life.how, life.steps(steps + after)[steps:]


@pytest.mark.wide
@pytest.mark.parametrize("layout", ["--tp 2 --sequence-parallel", ""])
def test_adapters_continue_beside_the_frozen_weights_of_the_copies(
    layout: str, memory: Any, rank_pools: RankPools, tmp_path: Path
) -> None:
    files, old = memory(2), "--tp 2 --sequence-parallel"
    (_, through), _ = rank_pools(2).run(train_beside_a_base, files, hosts(2), tmp_path, old, STEPS, AFTER)
    files = memory(2)
    rank_pools(2).run(train_beside_a_base, files, hosts(2), tmp_path, old, STEPS, 0)
    (how, ended), _ = rank_pools(2).run(train_beside_a_base, files, hosts(2), tmp_path, layout, 0, AFTER)
    assert str(how).startswith(f"continues from the copies in memory of step {STEPS}")
    for loss, wanted in zip(ended, through, strict=True):
        assert_number_close(loss, wanted, "loss")


def test_another_copy_is_used_for_a_damaged_one(memory: Any, rank_pools: RankPools, tmp_path: Path) -> None:
    files, flags = memory(4), f"{EVERY} --global-batch-size 12 --data-parallel-sharding-strategy optim_grads_params"
    through = rank_pools(4).run(train, files, hosts(4), tmp_path, flags, STEPS, 1)
    files = memory(4)
    rank_pools(4).run(train, files, hosts(4), tmp_path, flags, STEPS, 0)
    flip(files, 3, STEPS, kept=True)  # that of rank 1, which has it, too
    three = Memory((files.files[1], files.files[3], files.files[0]), os.getpid())
    how, notes, losses, _ = rank_pools(3).run(train, three, hosts(3), tmp_path, flags, 0, 1)[0]
    assert how == f"continues from the copies in memory of step {STEPS} (of 4 ranks, sent to those that need them now)"
    assert f"WARNING: loading the copies in memory of step {STEPS} failed on rank 1:" in notes[0]
    assert_number_close(losses[0], through[0][2][0], "loss")


def keeps(memory: Memory, nodes: Sequence[str], folder: Path) -> list[list[int]]:
    life = born(memory, nodes, folder, EVERY)
    found = [own_steps(life)]
    for _ in range(2):
        life.steps(1)
        found.append(own_steps(life))
    return found


def test_copies_of_other_ranks_are_there_until_there_are_two_others(
    memory: Any, rank_pools: RankPools, tmp_path: Path
) -> None:
    files = memory(4)
    rank_pools(4).run(train, files, hosts(4), tmp_path, EVERY, STEPS, 0)
    fewer, _ = with_ranks(files, 2)
    for found in rank_pools(2).run(keeps, fewer, hosts(2), tmp_path):
        assert found == [[STEPS], [STEPS, STEPS + 1], [STEPS + 1, STEPS + 2]]

"""Copies in memory: a run that continues from them has the bits of one that was not stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.extras.recovery.memory import Memory, train
from tests.harness.close import assert_bits_equal
from tests.harness.rank_pool import RankPools

STEPS, AFTER = 3, 2
LOCAL = "--local-update diloco --local-update-period 2"
RUNS = {
    "replicas": (2, ""),
    "heads": (2, "--tp 2 --sequence-parallel"),
    "stages": (4, "--pp 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2"),
    "v": (4, "--pp 2 --num-layers 4 --pipeline-schedule zb-v --use-distributed-optimizer"),
    "context": (2, "--cp 2"),
    "shards": (3, "--data-parallel-sharding-strategy optim_grads --global-batch-size 6"),
    "shards of weights": (2, "--data-parallel-sharding-strategy optim_grads_params --bf16 --no-fp64"),
    "instances": (4, "--data-parallel-sharding-strategy optim_grads --num-distributed-optimizer-instances 2"),
    "experts": (4, "--num-experts 4 --ep 2 --use-distributed-optimizer"),
    "masters in bf16": (2, "--bf16 --no-fp64 --use-distributed-optimizer --use-precision-aware-optimizer"),
    "loss scale": (2, "--fp16 --no-fp64 --initial-loss-scale 65536"),
    "on the host": (2, "--bf16 --no-fp64 --use-distributed-optimizer --optimizer-cpu-offload "
                       "--optimizer-offload-fraction 0.5"),
    "muon": (2, "--optimizer muon"),
    "local updates": (2, f"{LOCAL} --local-update-delay 1"),
    "compressed": (2, "--gradient-compression powersgd --compression-rank 2"),
}  # fmt: skip


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[Memory] = []

    def of(ranks: int) -> Memory:
        made.append(Memory.of(ranks))
        return made[-1]

    yield of
    for each in made:
        each.close()


def hosts(ranks: int, nodes: int = 2) -> list[str]:
    """Return names of hosts with equal numbers of ranks, in blocks."""
    return [f"node{rank * nodes // ranks}" for rank in range(ranks)] if ranks % nodes == 0 else list("abcdefgh"[:ranks])


def assert_same(results: list[Any], others: list[Any]) -> None:
    for (_, _, losses, kept), (_, _, again, found) in zip(results, others, strict=True):
        assert losses == again
        assert kept.keys() == found.keys()
        for name, values in kept.items():
            assert_bits_equal(found[name], values, name)


@pytest.mark.wide_except("experts", "on the host")
@pytest.mark.parametrize("case", RUNS)
def test_a_run_continues_from_memory_with_the_same_bits(
    case: str, memory: Any, rank_pools: RankPools, tmp_path: Path
) -> None:
    """The second time, the last node is new: its ranks get their copies from their partners."""
    ranks, flags = RUNS[case]
    flags += f" --memory-checkpoint-interval {STEPS}"
    files, nodes = memory(ranks), hosts(ranks)
    through = rank_pools(ranks).run(train, files, nodes, tmp_path, flags, STEPS, AFTER)
    assert [how for how, *_ in through] == [None] * ranks
    resumed = rank_pools(ranks).run(train, files, nodes, tmp_path, flags, 0, AFTER)
    assert {how for how, *_ in resumed} == {f"continues from the copies in memory of step {STEPS}"}
    assert_same(through, resumed)
    lost = [rank for rank, node in enumerate(nodes) if node == nodes[-1]]
    files.lose(*lost)
    replaced = rank_pools(ranks).run(train, files, nodes, tmp_path, flags, 0, AFTER)
    assert f"rank {lost[0]}'s from its partner, rank" in replaced[0][0]
    assert_same(through, replaced)
    again = rank_pools(ranks).run(train, memory(ranks), nodes, tmp_path, f"{flags}00", STEPS, AFTER)  # without copies
    assert_same(through, again)

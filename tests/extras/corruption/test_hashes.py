"""A bit that flips in the weights of one rank is found, and the rank is named if it can be known."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.extras.corruption.corruption_run import HASHES, Flip, train
from tests.harness.rank_pool import RankPools

EXPERTS = "--num-experts 4 --ep 2 --moe-router-topk 2 --disable-bias-linear"
NORM = "input_norm.weight"


def wide(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.wide)


@pytest.mark.parametrize(
    ("flags", "ranks", "flip", "expected"),
    [
        ("", 2, Flip(1, 3), "ranks 0 (H), 1 (H) have different weights, and it is not known which"),
        ("--bf16", 3, Flip(1, 3, master=True), "rank 1 (H) has other weights than ranks 0 (H), 2 (H): layers.1.mlp."),
        ("--tp 2 --sequence-parallel", 4, Flip(3, 3, NORM), "rank 3 (H) has other weights than ranks 0 (H), 1 (H), 2"),
        ("--use-distributed-optimizer", 2, Flip(1, 4, in_forward=True), "rank 1 (H) has weights or state that have"),
        wide("--bf16 --zero 1", 2, Flip(0, 4, in_forward=True, master=True), "rank 0 (H) has weights or state that"),
        wide("--bf16", 2, Flip(0, 4), "ranks 0 (H), 1 (H) have different weights"),
        wide("", 3, Flip(2, 4), "rank 2 (H) has other weights than ranks 0 (H), 1 (H)"),
        wide("--tp 2", 4, Flip(1, 3), "ranks 1 (H), 3 (H) have different weights"),
        wide("--tp 2", 4, Flip(1, 4, NORM), "rank 1 (H) has other weights than ranks 0 (H), 2 (H), 3 (H)"),
        wide("--pp 2", 4, Flip(3, 3, "layers.1.mlp.down"), "ranks 2 (H), 3 (H) have different weights"),
        wide("--pp 2", 4, Flip(3, 3, "embedding.word"), "rank 3 (H) has other weights than ranks 0 (H), 1 (H), 2"),
        wide("--cp 2", 4, Flip(3, 3), "rank 3 (H) has other weights than ranks 0 (H), 1 (H), 2 (H)"),
        wide(EXPERTS, 4, Flip(3, 3, "moe.down"), "ranks 1 (H), 3 (H) have different weights"),
        wide("--zero 2", 3, Flip(1, 4, in_forward=True), "rank 1 (H) has weights or state that have"),
        wide("--zero 3", 2, Flip(0, 4, in_forward=True), "rank 0 (H) has weights or state that have"),
        wide("--zero 3 --instances 2", 4, Flip(0, 4), "ranks 0 (H), 2 (H) have different weights"),
    ],
)  # fmt: skip
def test_a_flipped_bit_is_found(flags: str, ranks: int, flip: Flip, expected: str, rank_pools: RankPools) -> None:
    flags = flags.replace("--zero 1", "--use-distributed-optimizer")
    flags = flags.replace("--zero 2", "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads")
    flags = flags.replace(
        "--zero 3", "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params"
    )
    flags = flags.replace("--instances", "--num-distributed-optimizer-instances")
    courses = rank_pools(ranks).run(train, f"{flags} {HASHES} 2", 6, flip)
    for course in courses:
        assert expected in without_host(course.error)
        assert course.error == courses[0].error
        assert course.error.startswith("before the update of step 4, ")
        assert flip.name in course.error or flip.master
        assert "Steps after 1 may be wrong. To go back, leave the node out, and begin anew" in course.error
        assert (len(course.bits), course.code) == (3, 93)


def without_host(text: str) -> str:
    return re.sub(r"\([^()]*\)", "(H)", text)

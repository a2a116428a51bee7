"""Gradients are checked before the update: a wrong sum is found and named, and a right one changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.extras.corruption.corruption_run import HASHES
from tests.extras.corruption.gradient_run import SYNC, Wrong, train
from tests.extras.corruption.test_hashes import EXPERTS, without_host
from tests.harness.rank_pool import RankPools

ZERO_1 = "--use-distributed-optimizer"
ZERO_2 = f"{ZERO_1} --data-parallel-sharding-strategy optim_grads"
ZERO_3 = f"{ZERO_1} --data-parallel-sharding-strategy optim_grads_params"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
RERUNS = "--rerun-on-replica-interval 2"


def wide(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.wide)


@pytest.mark.bits
@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        (f"{ZERO_3} {OVERLAP} {RERUNS}", 2),
        wide(f"{EXPERTS} --tp 2 --sequence-parallel --expert-tensor-parallel-size 1", 4),
        wide("", 3),
        wide(f"{ZERO_1} --bf16 --grad-reduce-in-bf16", 3),
        wide("--pp 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4", 4),
        wide("--tp 2 --sequence-parallel", 4),
        wide("--cp 2", 4),
        wide(f"{ZERO_2} {OVERLAP}", 3),
        wide(f"{ZERO_2} --num-distributed-optimizer-instances 2", 4),
        wide("--pp 2 --tp 2", 4),
    ],
)
def test_right_sums_change_nothing(flags: str, ranks: int, rank_pools: RankPools) -> None:
    plain = rank_pools(ranks).run(train, flags.replace(RERUNS, ""), 4)
    checked = rank_pools(ranks).run(train, f"{flags} {SYNC} 1", 4)
    for before, after in zip(plain, checked, strict=True):
        assert after.error == ""
        assert after.summed_again > 0
        assert after.weights == before.weights
        assert RERUNS in flags or after.bits == before.bits  # which sends more


@pytest.mark.parametrize(
    ("flags", "ranks", "wrong", "expected"),
    [
        (f"{ZERO_1} {SYNC} 1", 2, Wrong("sum", 1, 3), "rank 1 (H) got another sum of gradients along dp than what"),
        (f"{SYNC} 3", 3, Wrong("gather", 1, 3), "rank 1 (H) has other gradients than ranks 0 (H), 2 (H) along dp: "),
        (f"--tp 2 --sequence-parallel {SYNC} 3", 4, Wrong("partial sum", 0, 3),
         "ranks 0 (H), 1 (H), 2 (H), 3 (H) have different gradients along tp: "),
        wide(f"{SYNC} 1", 2, Wrong("gather", 0, 3), "ranks 0 (H), 1 (H) have different gradients along dp: "),
        wide(f"{ZERO_2} {OVERLAP} {SYNC} 1", 2, Wrong("sum", 0, 3), "got another sum of gradients along dp than what"),
        wide(f"{ZERO_3} {SYNC} 1", 3, Wrong("sum", 2, 3), "got another sum of gradients along dp than what ranks had"),
        wide(f"--tp 2 {SYNC} 3", 4, Wrong("gather", 3, 3), " along dp"),
        wide(f"--pp 2 {ZERO_1} --num-layers 4 {SYNC} 1", 4, Wrong("sum", 3, 3), "another sum of gradients along "),
    ],
)  # fmt: skip
def test_a_wrong_sum_is_found(flags: str, ranks: int, wrong: Wrong, expected: str, rank_pools: RankPools) -> None:
    courses = rank_pools(ranks).run(train, flags, 6, wrong)
    for course in courses:
        assert course.error.startswith("before the update of step 3, rank")
        assert expected in without_host(course.error)
        assert course.error == courses[0].error
        assert (len(course.bits), course.code) == (2, 93)


def test_a_wrong_sum_beyond_the_interval_is_not_looked_at(rank_pools: RankPools) -> None:
    """The check costs only every N-th step."""
    for course in rank_pools(2).run(train, f"{SYNC} 2", 3, Wrong("gather", 1, 3)):
        assert (course.error, len(course.bits)) == ("", 3)


@pytest.mark.parametrize(
    ("flags", "first", "expected"),
    [
        (f"{SYNC} 3", [Wrong("gather", 1, 2)], "All steps so far may be wrong"),
        (f"{SYNC} 3 {HASHES} 4", [], "Steps after 3 may be wrong"),
    ],
    ids=["alone", "with hashes"],
)
def test_right_sums_do_not_vouch_for_weights(
    flags: str, first: list[Wrong], expected: str, rank_pools: RankPools
) -> None:
    """Weights differ after step 2, and the gradients of step 3 agree all the same."""
    for course in rank_pools(2).run(train, flags, 6, *first, Wrong("gather", 1, 6)):
        assert len(course.bits) == 5
        assert expected in course.error

"""A step that another replica computes, too: what is wrong is told from what is right, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.extras.corruption.corruption_run import HASHES, RERUNS, Wrong, bytes_of_comparison, train
from tests.extras.corruption.test_hashes import EXPERTS, without_host
from tests.harness.rank_pool import RankPools

ZERO = "--use-distributed-optimizer --data-parallel-sharding-strategy"


def wide(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.wide)


@pytest.mark.bits
@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16", 2),
        wide(f"{EXPERTS} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1", 4),
        wide("", 3),
        wide("--tp 2 --sequence-parallel", 4),
        wide("--tp 2", 4),
        wide("--pp 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4", 4),
        wide("--cp 2", 4),
        wide(f"{ZERO} optim_grads", 3),
        wide(f"{ZERO} optim_grads_params --overlap-grad-reduce --overlap-param-gather", 2),
        wide(f"{ZERO} optim_grads_params --num-distributed-optimizer-instances 2 --recompute-activations", 4),
        wide(f"{EXPERTS} --tp 2 --sequence-parallel --expert-tensor-parallel-size 1", 4),
    ],
)
def test_nothing_changes_and_nothing_is_found(flags: str, ranks: int, rank_pools: RankPools) -> None:
    plain = rank_pools(ranks).run(train, flags, 4)
    checked = rank_pools(ranks).run(train, f"{flags} {HASHES} 1 {RERUNS} 2", 4)
    assert checked == plain
    assert len(plain[0].bits) == 4


@pytest.mark.parametrize(
    ("flags", "ranks", "wrong", "expected"),
    [
        # A rank of two has six micro-batches: those of the other rank, its own, then both again.
        ("", 2, Wrong(1, calls=(7,)), "rank 1 (H) computed wrong gradients, and right ones when they were"),
        ("", 2, Wrong(1), "ranks 0 (H), 1 (H) computed different gradients of the same micro-"),
        ("", 3, Wrong(1), "rank 1 (H) computed wrong gradients, more than once"),
        wide("", 3, Wrong(2, calls=(2,)), "rank 2 (H) computed wrong gradients, and right ones"),
        wide("--tp 2", 4, Wrong(3, calls=(6,)), "ranks 2 (H), 3 (H) computed wrong gradients, and right ones"),
        wide(f"{ZERO} optim_grads", 3, Wrong(0), "rank 0 (H) computed wrong gradients, more than once"),
        wide(f"{ZERO} optim_grads_params", 2, Wrong(1, calls=(7,)), "rank 1 (H) computed wrong gradients, and right"),
    ],
)  # fmt: skip
def test_a_wrong_forward_is_found(flags: str, ranks: int, wrong: Wrong, expected: str, rank_pools: RankPools) -> None:
    courses = rank_pools(ranks).run(train, f"{flags} {RERUNS} 2", 6, wrong, None, 4)
    kind = "transient" if wrong.calls else "sticky"
    for course in courses:
        assert expected in without_host(course.error)
        assert course.error.startswith("step 4: ")
        assert f"the fault is {kind}. Steps after 1 may be wrong" in course.error
        assert (len(course.bits), course.code) == (3, 93)


def test_what_the_program_computes_is_told_from_a_fault(rank_pools: RankPools) -> None:
    """All replicas get the same infinity. Then one of them gets it, once."""
    flags = f"{RERUNS} 5"
    plain = rank_pools(2).run(train, "", 3, Wrong(None, value=float("inf")), None, 3)
    courses = rank_pools(2).run(train, flags, 3, Wrong(None, value=float("inf")), None, 3)
    for course in courses:
        assert course.reports[0].startswith(plain[0].reports[0])
        assert course.reports[0].endswith("it had equal bits, and was not finite: the fault is deterministic, of the "
                                          "model, its weights or its data, and not of a device")  # fmt: skip
        assert course.bits == plain[0].bits
    for course in rank_pools(2).run(train, flags, 3, Wrong(1, calls=(0,), value=float("inf")), None, 3):
        assert course.reports[0].endswith("On two replicas it was finite, with equal bits: the fault was transient")


def test_a_computation_for_comparison_sends_nothing(rank_pools: RankPools) -> None:
    """Nothing but counts of tokens and flags."""
    for sent, gradients in rank_pools(2).run(bytes_of_comparison, ""):
        assert sent < 200 < gradients

"""Compressed gradients in a run: the limits are plain data parallelism, and the rest is a plain loop over two networks."""

from __future__ import annotations

import pytest

from tests.distributed.test_local_update import Outcome, run
from tests.harness.close import assert_bits_equal, assert_number_close
from tests.harness.rank_pool import RankPools

EXACT = {
    "topk": "topk --compression-ratio 1",
    "threshold": "threshold --compression-ratio 1",
    "randomk": "randomk --compression-ratio 1",
    "powersgd": "powersgd --compression-rank 16",
}
LAYOUTS = {"dp 2": (2, ""), "dp 3": (3, "--global-batch-size 6"), "zero 1": (2, "--use-distributed-optimizer"), "tp 2": (4, "--tp 2 --sequence-parallel"), "pp 2": (4, "--pp 2 --overlap-grad-reduce")}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", EXACT)
def test_what_leaves_out_nothing_is_plain_data_parallelism(method: str, layout: str, rank_pools: RankPools) -> None:
    ranks, flags = LAYOUTS[layout]
    plain = rank_pools(ranks).run(run, flags, 3)
    packed = rank_pools(ranks).run(run, f"{flags} --gradient-compression {EXACT[method]}", 3)
    for ours, theirs in zip(packed, plain, strict=True):
        assert ours.losses == theirs.losses
        for name, (_, values) in ours.held.items():
            assert_bits_equal(values, theirs.held[name][1], name)


@pytest.mark.parametrize("flags", ["", "--use-distributed-optimizer", "--tp 2 --sequence-parallel", "--pp 2", "--no-error-feedback", "--sites 2"])
@pytest.mark.parametrize("method", ["fp16", "bf16", "int8", "fp8", "topk", "randomk", "threshold", "signsgd", "count-sketch", "powersgd"])
def test_a_run_trains_and_its_replicas_agree(method: str, flags: str, rank_pools: RankPools) -> None:
    rate = " --compression-ratio 0.2" if method in ("topk", "randomk", "threshold", "count-sketch") else ""
    rank = " --compression-rank 2" if method == "powersgd" else ""
    if method == "powersgd" and "sites" in flags: pytest.skip()
    found: list[Outcome] = rank_pools(4).run(run, f"--lr 0.003 {flags} --gradient-compression {method}{rate}{rank}", 9)
    print(method, flags, found[0].losses[::4])
    for outcome in found:
        assert outcome.losses == found[0].losses
    for name, (box, values) in found[0].held.items():
        for other in found:
            if name in other.held and other.held[name][0] == box:
                assert_bits_equal(other.held[name][1], values, name)

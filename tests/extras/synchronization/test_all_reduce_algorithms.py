"""Sums of gradients around a ring, up a tree and over sites: on messages alone, and in runs, against the backend's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.extras.synchronization.all_reduce import RingReduction, TreeReduction
from megalite.optim.layout import BucketLayout, BucketShardSpec, Slot
from megalite.optim.reduction import Reduction, ReductionGroups
from megalite.parallel.mesh import Group, ParallelMesh, UnconnectedMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.placement import replicated
from megalite.parallel.sharding import LogicalTensor, Normal
from tests.extras.synchronization.test_local_update import RATE, run
from tests.harness.close import assert_bits_equal, assert_number_close, assert_parameter_close
from tests.harness.rank_pool import RankPools

KINDS: dict[str, type[Reduction]] = {"ring": RingReduction, "tree": TreeReduction}
ROWS = (1, 7, 64)  # elements of a rank's slice


def mesh_of_all() -> ParallelMesh:
    return ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size())


def reduction(kind: str, length: int, mesh: ParallelMesh) -> Reduction:
    record = replicated(mesh, LogicalTensor("w", (length,), Normal(0.0), False), grad_is_partial=False)
    parameter = Parameter(record, torch.float64, mesh.device)
    layout = BucketLayout((Slot(parameter, 0, length),), length)
    spec = BucketShardSpec.of(layout, mesh.rank, peers=mesh.world_size, position=mesh.rank)
    alone = Group((mesh.rank,), 0)
    return KINDS[kind](spec, ReductionGroups(mesh.group("dp"), alone, alone))


def gradient(rank: int, length: int, *, integers: bool) -> Tensor:
    values = torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (1000 * values).round() if integers else values


def sums(kind: str, *, integers: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return, of buckets that are in flight together, the slice in place, in memory of its own, and the whole sum."""
    mesh = mesh_of_all()
    group, found = mesh.group("dp"), []
    buckets = [gradient(mesh.rank, rows * group.size, integers=integers) for rows in ROWS]
    reductions = [reduction(kind, len(bucket), mesh) for bucket in buckets]
    slices = [bucket.view(group.size, -1)[group.rank] for bucket in buckets]
    copies = [(bucket.clone(), torch.empty_like(own)) for bucket, own in zip(buckets, slices, strict=True)]
    started = [each.begin(bucket, own) for each, bucket, own in zip(reductions, buckets, slices, strict=True)]
    apart = [each.begin(bucket, out) for each, (bucket, out) in zip(reductions, copies, strict=True)]
    own = [(each.wait().clone(), other.wait()) for each, other in zip(started, apart, strict=True)]
    gathers = [each.begin_gather(*of) for each, of in zip(reductions, zip(slices, buckets, strict=True), strict=True)]
    for (shard, other), gather in zip(own, gathers, strict=True):
        found.append((shard, other, gather.wait()))
    return found


def in_order(kind: str, gradients: list[Tensor]) -> Tensor:
    """Return the sum in the order that the documentation of the algorithm names."""
    size = len(gradients)
    if kind == "ring":
        rows = [each.view(size, -1) for each in gradients]
        orders = [[(k + 1 + step) % size for step in range(size)] for k in range(size)]
        return torch.cat([functools.reduce(torch.add, [rows[r][k] for r in order]) for k, order in enumerate(orders)])

    def of(rank: int) -> Tensor:
        below = [of(child) for child in (2 * rank + 1, 2 * rank + 2) if child < size]
        return functools.reduce(torch.add, [gradients[rank], *below])

    return of(0)


@pytest.mark.bits
@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_messages_add_up_in_the_documented_order(kind: str, size: int, rank_pools: RankPools) -> None:
    for integers in (True, False):
        ranks = rank_pools(size).run(sums, kind, integers=integers)
        for number, rows in enumerate(ROWS):
            gradients = [gradient(rank, rows * size, integers=integers) for rank in range(size)]
            expected = in_order(kind, gradients)
            if integers:
                assert_bits_equal(expected, functools.reduce(torch.add, gradients))
            for rank, found in enumerate(ranks):
                shard, apart, whole = found[number]
                assert_bits_equal(shard, expected.view(size, -1)[rank])
                assert_bits_equal(apart, shard)
                assert_bits_equal(whole, expected)


def sums_over_sites() -> tuple[Tensor, Tensor]:
    """Return the sum of the gradients of four ranks on two sites, and the sum in rank order."""
    mesh = mesh_of_all()
    rank, gradients = mesh.rank, [gradient(rank, 28, integers=True) for rank in range(4)]
    record = replicated(mesh, LogicalTensor("w", (28,), Normal(0.0), False), grad_is_partial=False)
    layout = BucketLayout((Slot(Parameter(record, torch.float64, mesh.device), 0, 28),), 28)
    spec = BucketShardSpec.of(layout, rank, peers=4, position=rank, instances=2)
    within, between = mesh.group_of([rank // 2 * 2, rank // 2 * 2 + 1]), mesh.group_of([rank % 2, rank % 2 + 2])
    each = Reduction(spec, ReductionGroups(within, between, Group((rank,), 0)))
    bucket = gradients[rank].clone()
    shard = bucket.view(2, -1)[rank % 2]
    each.begin(bucket, shard).wait()
    each.sum_over_instances(shard)
    each.complete(shard)
    return each.begin_gather(shard, bucket).wait(), functools.reduce(torch.add, gradients)


def test_sums_over_sites_are_exact_on_integers(rank_pools: RankPools) -> None:
    for found, expected in rank_pools(4).run(sums_over_sites):
        assert_bits_equal(found, expected)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("kind", "sent"), [("ring", [64] * 5), ("tree", [80, 120, 40, 40, 40])])
def test_ranks_without_processes_count_their_messages(kind: str, sent: list[int], device: str) -> None:
    """Bytes of a bucket of 40 on 5 ranks. The root of the tree has two children, and rank 1 a parent too."""
    for rank, expected in enumerate(sent):
        mesh = UnconnectedMesh(rank=rank, world_size=5, device=torch.device(device))
        each, values = reduction(kind, 5, mesh), torch.ones(5, dtype=torch.float64, device=device)
        heard: list[tuple[str, tuple[int, ...], int]] = []
        mesh.traffic.listener = lambda *message, heard=heard: heard.append(message)
        before = mesh.traffic.bytes_sent
        shard = each.begin(values, values[rank : rank + 1]).wait()
        assert shard.shape == (1,)
        assert each.begin_gather(shard, values).wait().shape == (5,)
        assert device == "meta" or values.tolist() == [1.0] * 5
        assert mesh.traffic.bytes_sent - before == sum(size for what, _, size in heard if what == "send") == expected
        assert {what for what, _, _ in heard} == {"send", "receive"}
        assert all(ranks[0] == rank != ranks[1] for _, ranks, _ in heard)


OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 500"
LAYOUTS: dict[str, tuple[int, str]] = {
    "data": (3, "--global-batch-size 6"),
    "overlapped": (4, OVERLAP),
    "tensor": (4, f"--tp 2 --sequence-parallel {OVERLAP}"),
    "stages": (4, f"--pp 2 {OVERLAP}"),
    "sharded": (2, f"--use-distributed-optimizer {OVERLAP} --overlap-param-gather"),
}
SHARDED = "--data-parallel-sharding-strategy"


@pytest.mark.wide_except("ring-tensor", "ring-overlapped", "tree-stages", "tree-sharded")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_as_with_the_backend(kind: str, layout: str, rank_pools: RankPools) -> None:
    ranks, flags = LAYOUTS[layout]
    check(rank_pools, ranks, flags, f"--all-reduce-algorithm {kind}")


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_a_ring_scatters_the_sum_of_each_micro_batch(strategy: str, rank_pools: RankPools) -> None:
    check(rank_pools, 2, f"{SHARDED} {strategy} {OVERLAP}", "--all-reduce-algorithm ring")


@pytest.mark.wide_except("--tp 2 --sequence-parallel", "--use-distributed-optimizer")
@pytest.mark.parametrize("flags", ["", "--tp 2 --sequence-parallel", "--pp 2", "--use-distributed-optimizer", OVERLAP])
def test_sites_train_as_one(flags: str, rank_pools: RankPools) -> None:
    check(rank_pools, 4, flags, "--sites 2")


def check(rank_pools: RankPools, ranks: int, flags: str, algorithm: str) -> None:
    """Compare runs with the backend's sums and with others, and the copies of parameters with each other, by bits."""
    plain, ours = (rank_pools(ranks).run(run, f"{flags} {each}", 3) for each in ("", algorithm))
    copies: dict[Any, Tensor] = {}
    for found, expected in zip(ours, plain, strict=True):
        for number, (loss, of_plain) in enumerate(zip(found.losses, expected.losses, strict=True)):
            assert_number_close(loss, of_plain, f"loss {number}", 1e-10)
        for name, (box, values) in found.held.items():
            assert_parameter_close(values, expected.held[name][1], RATE, name)
            assert_bits_equal(copies.setdefault((name, box), values), values, f"a copy of {name}")

"""Groups of a mesh, created by real processes."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.errors import CommunicationError
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite.pipeline.point_to_point import make_links
from megalite.pipeline.stages import Stages
from tests.harness.job import Job
from tests.harness.rank_pool import RankPools

Spawn = Callable[..., Job]


def sums_over(groups: list[tuple[int, ...]], repeats: int) -> list[float]:
    """Return sums over this rank's groups, in order, on meshes created repeatedly by ranks of different speed."""
    rank = dist.get_rank()
    sums = []
    for repeat in range(repeats):
        mesh = ParallelMesh(rank=rank, world_size=dist.get_world_size(), tensor_parallel_size=dist.get_world_size())
        time.sleep(0.01 * ((rank + repeat) % 3))
        mine = [mesh.group_of(ranks) for ranks in groups if rank in ranks]
        sums += [collectives.all_reduce_(torch.tensor([2.0**rank]), group).item() for group in mine]
        collectives.all_reduce_(torch.zeros(1), mesh.world())
        mesh.close()
    return sums


def test_groups_that_overlap_in_a_chain_find_each_other(rank_pools: RankPools) -> None:
    """Rank 1's group with rank 2 is its first, but rank 2's second."""
    results = rank_pools(4).run(sums_over, [(2, 3), (1, 2), (0, 1)], repeats=1)
    assert results == [[3.0], [6.0, 3.0], [12.0, 6.0], [12.0]]


def test_a_group_can_be_made_again(rank_pools: RankPools) -> None:
    """In one process, and in the next call of a pool, whose store still has the addresses of the previous call."""
    for _ in range(3):
        results = rank_pools(4).run(sums_over, [(0, 1), (2, 3)], repeats=5)
        assert results == [[3.0] * 5, [3.0] * 5, [12.0] * 5, [12.0] * 5]


def wait_alone() -> None:
    """Call a collective on rank 0 of 2 that its peer never calls."""
    mesh = ParallelMesh(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor_parallel_size=2,
        timeout=datetime.timedelta(seconds=0.2),
    )
    group = mesh.group("tp")
    if group.rank == 0:
        with pytest.raises(CommunicationError):
            collectives.all_reduce_(torch.zeros(1), group)


def test_a_run_waits_no_longer_than_it_was_told(rank_pools: RankPools) -> None:
    """torch gives later groups its own limit of half an hour, whatever limit the first group has."""
    rank_pools(4).run_within(20, wait_alone)


def wait_on_a_link() -> float:
    """Receive on rank 0 of 2: twice from a peer that is late, and once a message that is never sent."""
    mesh = ParallelMesh(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        pipeline_parallel_size=2,
        timeout=datetime.timedelta(seconds=1.0),
    )
    stages = Stages(2)
    links, waits = make_links(mesh, stages), mesh.link(1, 0).waits
    before = waits.seconds
    for _ in range(2):
        collectives.all_reduce_(torch.zeros(1), mesh.world())
        if mesh.rank == 1:
            time.sleep(0.4)
            links.send(torch.zeros(1), 0).wait()
        else:
            links.receive(torch.zeros(1), 1).wait()
    waited = waits.seconds - before
    if mesh.rank == 0:
        with pytest.raises(CommunicationError):
            links.receive(torch.zeros(1), 1).wait()
    return waited


def test_waiting_for_a_neighbour_is_added_up_and_has_the_same_limit(rank_pools: RankPools) -> None:
    """Time spent waiting for other ranks does not count as a rank's own work."""
    waited, sent = rank_pools(2).run_within(60.0, wait_on_a_link)
    assert waited > 0.4
    assert sent < waited


CLOSED = """
import pathlib, sys
import torch, torch.distributed as dist
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
dist.init_process_group("gloo")
mesh = ParallelMesh(rank=dist.get_rank(), world_size=4, tensor_parallel_size=2)
groups = [mesh.group("tp"), mesh.world(), mesh.link(*sorted((mesh.rank, mesh.rank ^ 1)))]
for group in groups:
    collectives.all_reduce_(torch.zeros(1), group)
mesh.close()
dist.destroy_process_group()
for group in groups:
    try:
        collectives.all_reduce_(torch.zeros(1), group)
    except (AttributeError, TypeError, ValueError):
        continue
    sys.exit("a group of a closed mesh still sums")
print(*(name for task in pathlib.Path("/proc/self/task").iterdir() if "gloo" in (name := (task / "comm").read_text())))
"""


def test_no_thread_of_gloo_is_left_when_a_mesh_is_closed(spawn: Spawn, tmp_path: Path) -> None:
    """One that frees the tensors of the last collective while Python ends has a finished rank end by SIGABRT."""
    (tmp_path / "entry.py").write_text(CLOSED)
    job = spawn([tmp_path / "entry.py"], world_size=4)
    assert job.wait() == [0] * 4, [job.stderr(rank) for rank in range(4)]
    assert [job.stdout(rank) for rank in range(4)] == ["\n"] * 4

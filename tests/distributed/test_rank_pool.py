"""Pools of ranks, which every distributed test uses."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness.fork_server import RankFailure, RankTimeout, running, state
from tests.harness.rank_pool import SUSPENDS, RankPool, RankPools

WORLD_SIZE = 4


@pytest.fixture
def pool(rank_pools: RankPools) -> RankPool:
    return rank_pools(WORLD_SIZE)


def process_id() -> int:
    return os.getpid()


def sum_over_ranks(values: torch.Tensor, scale: float = 1.0) -> tuple[int, torch.Tensor]:
    total = values * scale * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return dist.get_rank(), total


def fail_on(ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        raise ValueError(f"planted on rank {dist.get_rank()}")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


def server_threads() -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


def group_count() -> int:
    before = len(dist.distributed_c10d._world.pg_map)
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.all_reduce(torch.ones(1), group=group)
    return before


def register_for_the_end() -> int:
    atexit.register(group_count)
    return atexit._ncallbacks()


def draw_and_disturb() -> tuple[torch.Tensor, torch.dtype, int]:
    drawn = torch.rand(3), torch.get_default_dtype(), torch.get_num_threads()
    torch.manual_seed(os.getpid())
    torch.set_default_dtype(torch.float64)
    return drawn


def backward_product(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.requires_grad_()
    (weight @ weight).sum().backward()
    assert weight.grad is not None
    return weight.grad


def unpicklable() -> object:
    return lambda: None


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_results_come_in_rank_order(rank_pools: RankPools, world_size: int) -> None:
    values = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    expected = values * 0.5 * (world_size * (world_size + 1) // 2)
    results = rank_pools(world_size).run(sum_over_ranks, values, scale=0.5)
    assert [rank for rank, _ in results] == list(range(world_size))
    for _, total in results:
        assert total.dtype == torch.bfloat16
        assert torch.equal(total, expected)


def test_processes_are_kept_between_calls(pool: RankPool) -> None:
    first = pool.run(process_id)
    assert len(set(first)) == WORLD_SIZE
    assert pool.run(process_id) == first


@pytest.mark.skipif(not SUSPENDS, reason="Linux alone")
def test_ranks_are_suspended_between_calls(pool: RankPool) -> None:
    """Threads of gloo would wake up all the time: with all pools of a test run, a fifth of two cores."""
    ranks = pool.run(process_id)
    deadline = time.monotonic() + 30
    while {state(rank) for rank in ranks} != {"T"}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert pool.run(process_id) == ranks


def test_fork_server_has_one_thread(pool: RankPool) -> None:
    assert pool.run(server_threads) == [1] * WORLD_SIZE


def test_backward_runs_here_and_in_ranks(pool: RankPool) -> None:
    """A fork of a process that has run a backward pass would hang: ranks started later must not be such forks."""
    weight = torch.eye(300)
    expected = backward_product(weight.clone())
    pool.close()
    assert all(torch.equal(gradient, expected) for gradient in pool.run(backward_product, weight))


def test_groups_of_a_call_are_destroyed(pool: RankPool) -> None:
    assert [pool.run(group_count) for _ in range(3)] == [[1] * WORLD_SIZE] * 3


def test_what_a_call_registers_for_the_end_of_its_process_is_dropped(pool: RankPool) -> None:
    """A library's run saves at the end: its groups, and their threads, would stay until then."""
    pool.run(process_id)
    assert [pool.run(register_for_the_end) for _ in range(2)] == [[1] * WORLD_SIZE] * 2


def test_every_call_starts_from_the_same_state(pool: RankPool) -> None:
    first, second = pool.run(draw_and_disturb), pool.run(draw_and_disturb)
    for drawn, dtype, threads in first + second:
        assert torch.equal(drawn, first[0][0])
        assert (dtype, threads) == (torch.float32, 1)


def test_lowest_failing_rank_is_reported_and_pool_recovers(pool: RankPool) -> None:
    before = pool.run(process_id)
    with pytest.raises(RankFailure, match="rank 1 of 4 raised") as caught:
        pool.run(fail_on, [3, 1])
    message = str(caught.value)
    assert "ValueError: planted on rank 1" in message
    assert "in fail_on" in message
    assert "ranks [3] raised too" in message
    assert "ranks [0, 2] had not answered" in message
    assert set(caught.value.failures) == {1, 3}
    assert not set(pool.run(process_id)) & set(before)


def test_dead_rank_is_reported_with_its_signal(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 2 of 4 was killed by SIGKILL") as caught:
        pool.run(die_on, 2)
    assert caught.value.failures[2] == "was killed by SIGKILL"
    assert len(pool.run(process_id)) == WORLD_SIZE


def test_rank_that_died_between_calls_is_reported(pool: RankPool) -> None:
    os.kill(pool.run(process_id)[3], signal.SIGKILL)
    with pytest.raises(RankFailure, match="rank 3 of 4 was killed by SIGKILL"):
        pool.run(process_id)


def test_timeout_names_the_silent_ranks_and_where_they_stand(pool: RankPool) -> None:
    pool.run(process_id)
    with pytest.raises(RankTimeout, match=r"ranks \[1\] of 4 did not answer within 0.5 s") as caught:
        pool.run_within(0.5, sleep_on, 1)
    assert "in sleep_on" in caught.value.failures[1]
    assert len(pool.run(process_id)) == WORLD_SIZE


@pytest.mark.wide
def test_ranks_end_with_a_test_process_that_is_killed(tmp_path: Path) -> None:
    """Otherwise ranks stuck in a call or in a job, or suspended between calls, would be there for ever."""
    script = tmp_path / "hold.py"
    script.write_text("import os, time\nprint(os.getpid())\ntime.sleep(1000)")
    program = f"""
from pathlib import Path
from tests.distributed.test_rank_pool import process_id, sleep_on
from tests.harness.job import Job
from tests.harness.rank_pool import RankPool
job = Job([{str(script)!r}], 1, Path({str(tmp_path)!r}))
job.wait_for_output(0, "\\n")
pool, resting = RankPool(2), RankPool(1)
print(*resting.run(process_id), *pool.run(process_id), job.stdout(0).strip(), flush=True)
pool.run(sleep_on, 0)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        process_ids = [int(word) for word in parent.stdout.readline().split()]
        assert len(process_ids) == 4
        assert all(running(number) for number in process_ids)
        parent.kill()
    deadline = time.monotonic() + 30
    while any(running(number) for number in process_ids):
        assert time.monotonic() < deadline, "ranks outlive the process that started them"
        time.sleep(0.05)


def test_result_that_cannot_travel_is_an_error(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"rank 0 of 4 raised"):
        pool.run(unpicklable)

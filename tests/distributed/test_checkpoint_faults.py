"""Two ranks save, and one of them is killed or its disk fails, at each of its operations in turn."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from megalite.errors import CheckpointError, CommunicationError
from megalite.parallel.mesh import ParallelMesh
from tests.harness.file_faults import Fault, FileFaults, cut_power, fail_with, kill
from tests.harness.forks import exit_code, fork, in_clean_process
from tests.harness.rank_pool import RankPools
from tests.harness.saved_run import Saved, SavedRun, contents, litter

FAILED = 3
SECONDS = 30.0
"""Time limit in seconds: a rank that then still waits for a killed one would wait for ever."""


def member(rank: int, port: int, directory: Path, saved: Saved, kind: str, at: int, victim: int, fault: Fault) -> None:
    """Save once, as one rank."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    run = SavedRun(ParallelMesh(rank=rank, world_size=2))
    with suppress(RuntimeError):  # the other rank may have ended
        dist.barrier()
    try:
        with FileFaults(directory, at if rank == victim else None, fault):
            run.save(directory, *saved, kind)
    except CommunicationError:
        os._exit(FAILED)


def exit_codes(processes: list[int]) -> list[int]:
    """Wait for the processes and return their exit codes; kill processes that hang."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if all(os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) for process in processes):
            break
        time.sleep(0.002)
    else:
        for process in processes:
            os.kill(process, signal.SIGKILL)
    return [exit_code(process) for process in processes]


def killed_saves(folder: Path, saved: Saved, kind: str, victim: int, fault: Fault) -> Iterator[tuple[Path, str]]:
    for at in itertools.count():
        directory = Path(shutil.copytree(folder / "before", folder / "killed"))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [fork(member, rank, store.port, directory, saved, kind, at, victim, fault) for rank in range(2)]
        codes = exit_codes(ranks)
        if codes == [0, 0]:
            assert at > 5
            return
        moment = f"rank {victim}: {fault.__name__} at operation {at}"
        assert codes[victim] == -signal.SIGKILL, moment
        assert codes[1 - victim] == FAILED, f"{moment}; the other ended with {codes[1 - victim]}"
        yield directory, moment
        shutil.rmtree(directory)


def kill_everywhere(folder: Path, saved: Saved, kind: str, victim: int, fault: Fault) -> set[Saved | None]:
    """Return the checkpoints found after the kills."""
    run = SavedRun()
    run.save(folder / "before", 1, 1)
    seen: set[Saved | None] = set()
    for directory, moment in killed_saves(folder, saved, kind, victim, fault):
        found, passed_over = run.newest(directory)
        assert found in ((1, 1), saved), moment
        assert not passed_over, moment
        seen.add(found)
        run.save(directory, 3, 3, kind)
        assert run.newest(directory) == ((3, 3), ()), moment
        assert not litter(directory), moment
    return seen


@pytest.mark.parametrize(
    ("kind", "victim", "fault"),
    [
        pytest.param("synchronous", 0, cut_power, marks=pytest.mark.wide),
        pytest.param("synchronous", 1, kill, marks=pytest.mark.wide),
        ("asynchronous", 1, kill),
        pytest.param("torch_dist", 0, kill, marks=pytest.mark.wide),
    ],
)
def test_whichever_rank_is_killed_a_whole_checkpoint_is_found(
    tmp_path: Path, kind: str, victim: int, fault: Fault
) -> None:
    saved = (1, 2)
    seen = in_clean_process(kill_everywhere, tmp_path, saved, kind, victim, fault)
    assert seen == ({(1, 1), saved} if victim == 0 else {(1, 1)})


def fail_everywhere(folder: Path, saved: Saved, kind: str, victim: int, number: int) -> list[str]:
    """Return the operations of the victim for which the ranks got no error. Every rank calls it."""
    run = SavedRun(ParallelMesh(rank=dist.get_rank(), world_size=2))
    run.save(folder / "before", 1, 1)
    before = contents(folder / "before")
    directory = folder / "failing"
    whole: list[str] = []
    silent: list[str] = []
    for at in itertools.chain([None], itertools.count()):
        dist.barrier()
        if run.mesh.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(folder / "before", directory)
        dist.barrier()
        message = ""
        with FileFaults(directory, at if run.mesh.rank == victim else None, fail_with(number)) as faults:
            try:
                run.save(directory, *saved, kind)
            except CheckpointError as error:
                message = str(error)
        told: list[tuple[str, list[str]]] = [("", [])] * 2
        dist.all_gather_object(told, (message, [str(operation) for operation in faults.operations]))
        operations = told[victim][1]
        if at is None:
            whole = operations
        elif at == len(operations):
            return silent
        elif not message:
            silent.append(operations[at])
        else:
            assert f"saving iteration {saved[0]} to {directory} failed on rank {victim}: " in message
            assert os.strerror(number) in message
            if run.mesh.rank == 0:
                done = operations == whole  # all except the last sync
                assert done or contents(directory) == before, operations[at]
                assert not litter(directory), operations[at]
        assert told[0][0] == told[1][0], told
        run.save(directory, 3, 3, kind)
        assert run.newest(directory) == ((3, 3), ())
    raise AssertionError


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "victim", "number"),
    [
        pytest.param("synchronous", 0, errno.EIO, marks=pytest.mark.wide),
        ("asynchronous", 1, errno.ENOSPC),
        pytest.param("torch_dist", 1, errno.EIO, marks=pytest.mark.wide),
    ],
)
def test_whichever_disk_fails_each_rank_is_told_and_nothing_is_lost(
    rank_pools: RankPools, tmp_path: Path, kind: str, victim: int, number: int
) -> None:
    silent, _ = rank_pools(2).run(fail_everywhere, tmp_path, (1, 2), kind, victim, number)
    assert {operation.split()[0] for operation in silent} <= {"unlink", "rmdir"}, "only clearing away may fail unheard"

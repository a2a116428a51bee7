"""Runs of real processes that hang in known ways: their flight recorders show which rank is missing, and where."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from megalite.watchdog.hang_analysis import Diagnosis, missing
from megalite.watchdog.hang_dump import Dumps, read_dumps
from megalite.watchdog.snapshot import Snapshot
from tests.harness.job import Job

SCRIPT = Path(__file__).with_name("hang_run.py")
Spawn = Callable[..., Job]


def hang(spawn: Spawn, folder: Path, case: str, silent: int = 0) -> Dumps:
    """Return the dumps of four ranks, `silent` of which write none."""
    job = spawn([SCRIPT, case, folder, 4 - silent], 4)
    deadline = time.monotonic() + 120
    while len(list(folder.glob("rank_*.json"))) < 4 - silent and time.monotonic() < deadline:
        assert not any(rank.exit_code for rank in job.ranks), job.stderr(0)
        time.sleep(0.02)
    job.close()
    return read_dumps(folder)


def causes(findings: list[Diagnosis]) -> list[str]:
    return [finding.text for finding in findings if finding.cause]


def findings_of(dumps: Dumps) -> list[Diagnosis]:
    return missing(dumps.snapshots, dumps.silent)


def recorded(snapshot: Snapshot) -> dict[str, list[tuple[int, str]]]:
    """Return the operations of each group that has any."""
    return {
        group.name: [(operation.number, operation.name) for operation in group.operations]
        for group in snapshot.groups
        if group.operations
    }


def test_a_skipped_collective_is_named_with_the_rank_that_skipped_it(spawn: Spawn, tmp_path: Path) -> None:
    (finding,) = findings_of(hang(spawn, tmp_path, "skipped"))
    assert finding == Diagnosis(
        "all_reduce #4 of ranks 0-3 (float32 [64]): ranks 0, 1, 3 are in it, rank 2 is not: the last one was #3",
        culprits=(2,),
        cause=True,
    )


def test_a_rank_in_another_operation_is_named_with_both(spawn: Spawn, tmp_path: Path) -> None:
    (finding,) = findings_of(hang(spawn, tmp_path, "other"))
    assert finding.culprits == (2,)
    assert finding.text == (
        "collective #2 of ranks 0-3 is not the same on all ranks: "
        "ranks 0, 1, 3 are in all_reduce (float32 [64]), rank 2 is in all_gather (float32 [64])"
    )


def test_a_rank_with_another_size_is_named_even_where_the_backend_let_it_pass(spawn: Spawn, tmp_path: Path) -> None:
    first, second = findings_of(hang(spawn, tmp_path, "sizes"))
    assert (first.culprits, second.culprits) == ((3,), (0,))
    assert "rank 3 is in broadcast (float32 [65])" in first.text


def test_a_stopped_rank_without_a_dump_is_the_cause_of_a_chain(spawn: Spawn, tmp_path: Path) -> None:
    dumps = hang(spawn, tmp_path, "stopped", silent=1)
    assert dumps.silent == (1,)
    findings = findings_of(dumps)
    assert [finding.text for finding in findings] == [
        "rank 1 left no record: suspended, ended or unreachable",
        "all_gather #1 of ranks 0, 1 (float32 [1, 64]): rank 0 is in it, rank 1 left no record",
        "all_gather #1 of ranks 1, 3 (float32 [1, 64]): rank 3 is in it, rank 1 left no record",
        "all_gather #1 of ranks 2, 3 (float32 [1, 64]): rank 2 is in it, rank 3 is not, and has started none so far",
    ]
    assert [finding.cause for finding in findings] == [True, True, True, False]
    assert {rank for finding in findings for rank in finding.culprits} == {1}


def test_a_missing_stage_is_found_by_the_messages_that_wait_for_it(spawn: Spawn, tmp_path: Path) -> None:
    findings = findings_of(hang(spawn, tmp_path, "pipeline"))
    assert causes(findings) == [
        "message #4 from rank 0 to rank 1: rank 0 sends it, rank 1 has not reached it: the last one was #3",
        "message #4 from rank 1 to rank 2: rank 2 waits for it, rank 1 has not reached it: the last one was #3",
    ]
    assert {rank for finding in findings for rank in finding.culprits} == {1}


def test_collectives_under_way_are_counted_from_the_first_that_lacks_a_rank(spawn: Spawn, tmp_path: Path) -> None:
    findings = findings_of(hang(spawn, tmp_path, "under_way"))
    assert {rank for finding in findings for rank in finding.culprits} == {1}
    assert causes(findings) == [
        "all_reduce #3 of ranks 0-3 (float32 [64]) (and 2 after it): ranks 0, 2, 3 are in it, "
        "rank 1 is not: the last one was #2",
        "all_gather #1 of ranks 0, 1 (float32 [1, 1]): rank 0 is in it, rank 1 is not, and has started none so far",
    ]


def test_a_run_that_does_not_hang_has_no_findings(spawn: Spawn, tmp_path: Path) -> None:
    dumps = hang(spawn, tmp_path, "healthy")
    assert findings_of(dumps) == []
    torchs = tmp_path / "torch"
    torchs.mkdir()
    for path in tmp_path.glob("nccl_trace_rank_*"):
        path.rename(torchs / path.name)
    assert {rank: recorded(snapshot) for rank, snapshot in read_dumps(torchs).snapshots.items()} == {
        rank: recorded(snapshot) for rank, snapshot in dumps.snapshots.items()
    }

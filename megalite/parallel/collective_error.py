"""Blocks of work that fail on all ranks or on none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from megalite.errors import CheckpointError, CorruptCheckpointError, MegaliteError
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import ParallelMesh
from megalite.storage import AnyPath

_EXPECTED = (OSError, SafetensorError, MegaliteError)  # any other error is a bug and keeps its traceback


@contextmanager
def raise_on_all_ranks(mesh: ParallelMesh, doing: str | None, advice: str = "") -> Iterator[None]:
    """Run the block on every rank. If it fails on one rank, all ranks raise, and none waits for the failed rank.

    Every rank raises the same CheckpointError. Its message names the work (`doing`), the lowest rank that failed, the
    reason, and `advice`; with None for `doing` the reason says what failed, and where. If every failure is damage, the
    error is a CorruptCheckpointError. Otherwise a failure that is not damage is reported. The block itself must not
    communicate.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    report = None
    if failure is not None:
        where = f" on rank {mesh.whole.rank}" if mesh.whole.world_size > 1 else ""
        why = str(failure) if isinstance(failure, _EXPECTED) else f"{type(failure).__name__}: {failure}"
        report = isinstance(failure, CorruptCheckpointError), why if doing is None else f"{doing} failed{where}: {why}"
    reports = all_gather_json(report, mesh)
    if failure is not None and not isinstance(failure, _EXPECTED):
        raise failure
    failed = sorted((report for report in reports if report is not None), key=lambda report: report[0])
    if failed:
        damaged, message = failed[0]
        kind = CorruptCheckpointError if damaged else CheckpointError
        raise kind(f"{message}\n{advice}" if advice else message) from failure


def check_all_see(what: str, path: AnyPath, mesh: ParallelMesh) -> None:
    """Raise CheckpointError on every rank if the ranks do not all have the same `what`, a text made from the path."""
    if len(set(all_gather_json(what, mesh))) > 1:
        raise CheckpointError(f"the ranks do not see the same files in {path}: it must be on a shared file system")

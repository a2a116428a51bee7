"""Lock that lets only one run at a time save into a directory. Two runs would remove each other's unfinished files.

Rank 0 holds a lock of the operating system (flock) on `DIR/lock` during the run, and writes into the file which run it
belongs to. The operating system releases the lock when the process ends for any reason, so a lock is never stale.
Network file systems (NFS, Lustre mounted with flock, GPFS, Ceph) share it between nodes. If locks are not supported, as
on object stores, a note reports this. The other ranks read the text that rank 0 wrote. If a rank does not find it, the
ranks do not share the directory.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megalite.atomic_files import lock_file, open_itself
from megalite.checkpoint.transaction import clear_away
from megalite.errors import CheckpointError, ConfigurationError
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import ParallelMesh
from megalite.storage import AnyPath, ObjectPath

NAME = "lock"
SEEN_WITHIN = 10.0
"""Number of seconds within which a network file system must show a file of one node on all others."""


@contextmanager
def only_run(directory: AnyPath, mesh: ParallelMesh) -> Iterator[tuple[str, ...]]:
    """Create `directory`, and keep other runs from saving into it during the block. Yield notes for the user.

    Every rank calls it. Raises ConfigurationError on every rank if another run saves there; the error names that run.
    Raises CheckpointError if the directory cannot be written, or if the ranks do not share it.
    """
    if isinstance(directory, ObjectPath):
        yield (f"note: {directory} is an object store, without locks: make sure that no other run saves there",)
        return
    file: IO[str] | None = None
    refusal, note, holder = "", "", ""
    with raise_on_all_ranks(mesh, f"preparing the run directory --save {directory}"):
        if mesh.rank == 0:
            file = _open(directory)
            os.register_at_fork(after_in_child=file.close)  # worker processes outlive a killed run, and would hold it
            refusal, note = _lock(file, directory)
            if not refusal:
                if not note:
                    clear_away(directory)  # leftover files may fill the disk
                holder = _write_holder(file)
    refusal, holder = all_gather_json([refusal, holder], mesh)[0]
    try:
        if refusal:
            raise ConfigurationError(refusal)
        with raise_on_all_ranks(mesh, f"checking the run directory --save {directory}"):
            _await(directory / NAME, holder)
        yield (note,) if note else ()
    finally:
        if file is not None:
            if not refusal:
                file.truncate(0)
            file.close()


def _open(directory: Path) -> IO[str]:
    """Create the folder, and open its lock file. Raises CheckpointError, which says what to do about it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return open_itself(directory / NAME, "a+")
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise CheckpointError(f"{error}\n{'Free space there, or give' if full else 'Give'} another --save") from error


def _lock(file: IO[str], directory: Path) -> tuple[str, str]:
    """Take the lock. Return an error message and a note.

    The error message is empty if the run may start, and the note is empty if the lock was taken.
    """
    try:
        lacking = lock_file(file)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        return (
            f"another run is saving into --save {directory} ({holder}): stop it, or give another --save. Two would "
            "overwrite each other's checkpoints"
        ), ""
    if lacking:
        return "", (
            f"note: the file system of {directory} has no locks ({lacking}): make sure that no other run saves there"
        )
    return "", ""


def _write_holder(file: IO[str]) -> str:
    """Write a description of this process into the lock file, and return it."""
    holder = f"process {os.getpid()} on {os.uname().nodename}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    file.truncate(0)
    file.write(holder)
    file.flush()
    os.fsync(file.fileno())
    return holder


def _await(path: Path, text: str) -> None:
    """Wait until a file contains a text. Raises CheckpointError if this takes longer than `SEEN_WITHIN`."""
    deadline = time.monotonic() + SEEN_WITHIN
    while not path.is_file() or path.read_text() != text:
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path}, written by rank 0, cannot be seen from here: the folder must be on a file system that "
                "all nodes share"
            )
        time.sleep(0.1)

"""One run at a time saves into a directory: two would clear away each other's unfinished files.

Rank 0 holds a lock of the operating system (flock) on `DIR/lock` for as long as it lives, and writes into the file who
it is. The system takes the lock back however the process ends, so none is ever stale; network file systems (NFS, Lustre
mounted with flock, GPFS, Ceph) pass it on between nodes. Where there are none, as on object stores, a note says so.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from megalite.checkpoint.agreement import all_gather_text, together
from megalite.checkpoint.storage import AnyPath, ObjectPath
from megalite.errors import ConfigurationError
from megalite.parallel.mesh import ParallelMesh

NAME = "lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def only_run(directory: AnyPath, mesh: ParallelMesh) -> Iterator[tuple[str, ...]]:
    """While the block runs no other run can save into `directory`, which is made; gives notes to show.

    Every rank calls it. Raises ConfigurationError on every rank, naming the other run, where there is one, and
    CheckpointError where the directory cannot be written to.
    """
    if isinstance(directory, ObjectPath):
        yield (f"note: {directory} has no locks, as an object store: see to it that no other run saves there",)
        return
    file: TextIO | None = None
    refusal, note = "", ""
    with together(mesh, f"preparing the run directory --save {directory}"):
        if mesh.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            file = (directory / NAME).open("a+")
            refusal, note = _lock(file, directory)
    refusal = all_gather_text(f":{refusal}", mesh)[0][1:]
    try:
        if refusal:
            raise ConfigurationError(refusal)
        yield (note,) if note else ()
    finally:
        if file is not None:
            if not refusal:
                file.truncate(0)
            file.close()


def _lock(file: TextIO, directory: Path) -> tuple[str, str]:
    """Why the run must not begin, and what to tell if it may; empty where there is nothing."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        return (
            f"another run is saving into --save {directory} ({holder}): stop it, or give another --save. Two would "
            "overwrite each other's checkpoints"
        ), ""
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return "", (
            f"note: the file system of {directory} has no locks ({error.strerror}): see to it that no other run saves "
            "there"
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return "", ""

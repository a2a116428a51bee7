"""Lock that lets only one run at a time save into a directory: two would remove each other's unfinished files.

Rank 0 holds a lock of the operating system (flock) on `DIR/lock` for as long as it lives, and writes into the file
which run it belongs to. The system releases the lock however the process ends, so no lock is ever stale; network file
systems (NFS, Lustre mounted with flock, GPFS, Ceph) pass it on between nodes. If locks are not supported, as on object
stores, a note says so. The other ranks look for the text that rank 0 wrote: if one does not see it, the ranks do not
share the directory.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from megalite.checkpoint.collective_error import all_gather_text, raise_on_all_ranks
from megalite.checkpoint.storage import AnyPath, ObjectPath
from megalite.checkpoint.transaction import clear_away
from megalite.errors import CheckpointError, ConfigurationError
from megalite.parallel.mesh import ParallelMesh

NAME = "lock"
SEEN_WITHIN = 10.0
"""Seconds after which a network file system must show on one node what another has written."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def only_run(directory: AnyPath, mesh: ParallelMesh) -> Iterator[tuple[str, ...]]:
    """Make `directory` and keep other runs from saving into it during the block; yield notes to show.

    Every rank calls it. Raises ConfigurationError on every rank, naming the other run, if there is one, and
    CheckpointError if the directory cannot be written to or is not the same for all ranks.
    """
    if isinstance(directory, ObjectPath):
        yield (f"note: {directory} has no locks, as an object store: see to it that no other run saves there",)
        return
    file: TextIO | None = None
    refusal, note, holder = "", "", ""
    with raise_on_all_ranks(
        mesh, f"preparing the run directory --save {directory}", "Free space there, or give another --save"
    ):
        if mesh.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            file = (directory / NAME).open("a+")
            refusal, note = _lock(file, directory)
            if not refusal:
                if not note:
                    clear_away(directory)  # it may fill the disk
                holder = _write_holder(file)
    refusal, holder = json.loads(all_gather_text(json.dumps([refusal, holder]), mesh)[0])
    try:
        if refusal:
            raise ConfigurationError(refusal)
        with raise_on_all_ranks(mesh, f"looking at the run directory --save {directory}"):
            _await(directory / NAME, holder)
        yield (note,) if note else ()
    finally:
        if file is not None:
            if not refusal:
                file.truncate(0)
            file.close()


def _lock(file: TextIO, directory: Path) -> tuple[str, str]:
    """Take the lock; return why the run must not begin, and a note if it may; each is empty if there is nothing to
    say."""
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
    return "", ""


def _write_holder(file: TextIO) -> str:
    """Write into the lock file which run saves from now on."""
    holder = f"process {os.getpid()} on {os.uname().nodename}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    file.truncate(0)
    file.write(holder)
    file.flush()
    os.fsync(file.fileno())
    return holder


def _await(path: Path, text: str) -> None:
    """Wait until a file holds a text. Raises CheckpointError if it does not within some time."""
    deadline = time.monotonic() + SEEN_WITHIN
    while not path.is_file() or path.read_text() != text:
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path}, as rank 0 has written it, cannot be seen from here: the folder must be on a file system that "
                "all nodes share"
            )
        time.sleep(0.1)

"""Files that control a run: `touch DIR/STOP`, `DIR/SAVE` or `DIR/PROFILE`, where DIR is the --save directory.

A signal reaches only the processes of one node, and launchers handle signals differently. A file works from every
machine that can access the run directory. Only rank 0 looks for the files, to limit the load on a shared file system.
The other ranks receive the result in the all-reduce after each step.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from megalite.errors import CheckpointError
from megalite.lifecycle.startup import SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_REQUESTS, STOP, identity
from megalite.parallel.mesh import ParallelMesh
from megalite.storage import AnyPath

SAVE, PROFILE = "SAVE", "PROFILE"


class ControlFiles:
    """The control files of a run directory. Only rank 0 reads them: other ranks, and runs without a directory, see
    none."""

    def __init__(self, directory: AnyPath | None, mesh: ParallelMesh) -> None:
        self._directory = directory if mesh.rank == 0 else None
        self._interval = SECONDS_BETWEEN_LOOKS if isinstance(directory, Path) else SECONDS_BETWEEN_REQUESTS
        self._next_look = 0.0
        self._stop = False
        self._asked: set[str] = set()

    def clear(self, preexisting_stop: object) -> tuple[str, ...]:
        """Remove control files that were meant for an earlier run, and return a message for each.

        A STOP is removed only if it is unchanged since this run began. Raises CheckpointError if one cannot be removed.

        Args:
            preexisting_stop: `identity` of the STOP when this run began, or None if there was none.
        """
        if self._directory is None:
            return ()
        stop_is_old = preexisting_stop is not None and identity(self._directory / STOP) == preexisting_stop
        names = (STOP, SAVE, PROFILE) if stop_is_old else (SAVE, PROFILE)
        found = [name for name in names if has_file(self._directory / name)]
        for name in found:
            try:
                (self._directory / name).unlink(missing_ok=True)
            except OSError as error:
                raise CheckpointError(
                    f"{self._directory / name} of an earlier run cannot be removed ({error.strerror}): remove it"
                ) from error
        return tuple(f"note: removed {self._directory / name}, which was there before this run" for name in found)

    def stop(self) -> bool:
        """Tell whether a STOP has been seen. The file is not removed: it shows later why the run ended."""
        self._look()
        return self._stop

    def take(self, name: str) -> bool:
        """Tell whether a file of this name (SAVE or PROFILE) appeared since the last call. It counts as one request."""
        self._look()
        asked = name in self._asked
        self._asked.discard(name)
        return asked

    def _look(self) -> None:
        if self._directory is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self._interval
        self._stop = self._stop or has_file(self._directory / STOP)
        for name in (SAVE, PROFILE):
            if has_file(self._directory / name):
                with suppress(OSError):  # no request if it cannot be removed: it would be repeated after every step
                    (self._directory / name).unlink(missing_ok=True)
                    self._asked.add(name)


def has_file(path: AnyPath) -> bool:
    """Tell whether a file exists. Returns False if the file system does not answer."""
    try:
        return path.is_file()
    except OSError:  # the file server may answer at the next look
        return False

"""Files by which a person or a script controls a run: `touch DIR/STOP`, `SAVE` or `PROFILE`, where DIR is --save.

A signal reaches the processes of one node, and each launcher treats it in another way; a file reaches a run from
wherever its directory is seen. Only rank 0 looks, so that hundreds of ranks do not ask a shared file system the same
question; the other ranks learn of it when the ranks agree on stopping.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from megalite.checkpoint import AnyPath
from megalite.errors import CheckpointError
from megalite.lifecycle.startup import SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_REQUESTS, STOP, identity
from megalite.parallel.mesh import ParallelMesh

SAVE, PROFILE = "SAVE", "PROFILE"


class ControlFiles:
    """The control files of a run directory, as rank 0 sees them; to other ranks, and without a directory, there are
    none."""

    def __init__(self, directory: AnyPath | None, mesh: ParallelMesh) -> None:
        self._directory = directory if mesh.rank == 0 else None
        self._interval = SECONDS_BETWEEN_LOOKS if isinstance(directory, Path) else SECONDS_BETWEEN_REQUESTS
        self._next_look = 0.0
        self._stop = False
        self._asked: set[str] = set()

    def clear(self, preexisting_stop: object) -> tuple[str, ...]:
        """Remove what was meant for an earlier run, and tell of it: a STOP only as it was when this one began
        (`identity`). Raises CheckpointError if it cannot be removed."""
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
                    f"{self._directory / name} is of an earlier run and cannot be removed ({error.strerror}): remove it"
                ) from error
        return tuple(f"note: removed {self._directory / name}, which was there before this run" for name in found)

    def stop(self) -> bool:
        """Tell if there is, or was, a STOP. The file is not removed: it shows later why the run has ended."""
        self._look()
        return self._stop

    def take(self, name: str) -> bool:
        """Tell if there is a SAVE or PROFILE, or was one since this was last asked. Each is one request."""
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
                with suppress(OSError):  # one that stays would ask again after every step
                    (self._directory / name).unlink(missing_ok=True)
                    self._asked.add(name)


def has_file(path: AnyPath) -> bool:
    """Tell whether there is a file, as far as can be seen now."""
    try:
        return path.is_file()
    except OSError:  # a file server that does not answer now may do so at the next look
        return False

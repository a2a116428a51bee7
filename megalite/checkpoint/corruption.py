"""Errors and checks for files that are not as they were written."""

from __future__ import annotations

import errno

from megalite.checkpoint.storage import AnyPath
from megalite.errors import CheckpointError, CorruptCheckpointError


class CorruptFileError(CorruptCheckpointError):
    """File of a checkpoint, or a tensor in it, that is not as it was written."""

    def __init__(self, path: AnyPath, problem: str, tensor: str | None = None) -> None:
        advice = "Load another checkpoint; megalite-inspect-checkpoint --verify lists all that is damaged"
        super().__init__(f"{path}: {problem}. {advice}")
        self.file, self.problem, self.tensor = path.name, problem, tensor


def unreadable(path: AnyPath, error: OSError) -> CheckpointError:
    """Return the error to raise when the system did not read a file.

    Data that the medium has lost or never had is damage; any other error, such as a missing permission, may pass.
    """
    if error.errno == errno.ENOENT:
        return CorruptFileError(path, "it is missing")
    problem = f"it cannot be read: {error.strerror or error}"
    if error.errno in (errno.EIO, errno.ENOTDIR, errno.EISDIR, errno.ENODATA):
        return CorruptFileError(path, problem)
    return CheckpointError(f"{path}: {problem}. Load another checkpoint")


def check_size(path: AnyPath, found: int, size: int) -> None:
    """Raise CorruptFileError if a file does not have the expected size."""
    if found != size:
        raise CorruptFileError(path, f"it has {found} bytes of {size}: it was cut off or replaced")

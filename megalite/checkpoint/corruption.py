"""Errors and checks for damaged files: files whose contents are not as they were written."""

from __future__ import annotations

import errno

from megalite.errors import CheckpointError, CorruptCheckpointError
from megalite.storage import AnyPath


class CorruptFileError(CorruptCheckpointError):
    """Damaged file of a checkpoint, or damaged tensor in it."""

    def __init__(self, path: AnyPath, problem: str, tensor: str | None = None) -> None:
        advice = "Load another checkpoint; megalite-inspect-checkpoint --verify lists all that is damaged"
        super().__init__(f"{path}: {problem}. {advice}")
        self.file, self.problem, self.tensor = path.name, problem, tensor


def unreadable(path: AnyPath, error: OSError) -> CheckpointError:
    """Return the error to raise after the operating system failed to read a file.

    Lost or missing data is damage. Any other failure, such as a missing permission, may be temporary.
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

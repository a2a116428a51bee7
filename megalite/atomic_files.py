"""Files that appear under their final name complete, or not at all."""

from __future__ import annotations

import glob
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from megalite.errors import FileError

TEMPORARY = ".megalite.tmp"
DAY = 24 * 3600.0


class TemporaryFile:
    """A binary file written beside its final path, which `rename` gives it. A context manager: discarded on the way out
    unless renamed.

    Args:
        path: the final path. Missing folders are made.
        temporary: the path until then, on the same file system; None: one beside the final path.
        size: bytes of an earlier `temporary` to go on from; what it has beyond them is cut off.

    Raises:
        FileError: the folder cannot be written to.
    """

    def __init__(self, path: Path, temporary: Path | None = None, size: int = 0) -> None:
        self.path = path
        self.temporary = temporary or temporary_path(path)
        try:
            self.temporary.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.temporary.open("r+b" if size else "wb")
            self._file.truncate(size)
            self._file.seek(size)
        except OSError as error:
            raise FileError(f"{path} cannot be written ({error.strerror}): choose another output path") from error

    def write(self, data: bytes) -> None:
        """Append."""
        try:
            self._file.write(data)
        except OSError as error:
            raise self._failure(error) from error

    def flush(self) -> None:
        """Hand what was written to the operating system: after this, a kill of the process cannot lose it."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._failure(error) from error

    def sync(self) -> None:
        """Close the file with everything on disk: after this, a crash of the machine cannot empty it."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise self._failure(error) from error

    def rename(self) -> None:
        """Give the synced file its final name, replacing what had it."""
        try:
            os.replace(self.temporary, self.path)
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Close the file where it is."""
        with suppress(OSError):  # what could not be flushed (a full disk) is not counted on
            self._file.close()

    def discard(self) -> None:
        """Close and remove the file if it was not renamed."""
        self.close()
        self.temporary.unlink(missing_ok=True)

    def _failure(self, error: OSError) -> FileError:
        return FileError(f"writing {self.path} failed ({error.strerror}): free space or choose another output path")

    def __enter__(self) -> TemporaryFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def temporary_path(path: Path) -> Path:
    """A name beside `path`, so that a rename is atomic, which no other process of any host takes."""
    return path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}{TEMPORARY}")


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes left under their `temporary_path`, a file or a folder. Other hosts' processes cannot
    be asked: what they have not written to for a day is left over."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.*{TEMPORARY}"):
        host, _, process = left.name[len(path.name) + 1 : -len(TEMPORARY)].rpartition(".")
        with suppress(OSError, ValueError):  # another process was faster
            here, folder = host == os.uname().nodename, left.is_dir()
            last_write = max(each.stat().st_mtime for each in (left, *(left.iterdir() if folder else ())))
            if (here and not _is_another_alive(int(process))) or last_write < time.time() - DAY:
                shutil.rmtree(left, ignore_errors=True) if folder else left.unlink()


def _is_another_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return process != os.getpid()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a whole file so that a reader finds the old one or the new one, whatever happens meanwhile."""
    remove_leftovers(path)
    with TemporaryFile(path) as file:
        file.write(data)
        file.sync()
        file.rename()
    sync_directory(path.parent)


def write_at_once(path: Path, data: bytes) -> None:
    """The same without waiting for the disk: for what nobody reads after a crash of the machine, where time counts."""
    with TemporaryFile(path) as file:
        file.write(data)
        file.flush()
        file.rename()


def sync_directory(path: Path) -> None:
    """Put the names in a folder on disk, as `fsync` does for the contents of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with path_in_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def path_in_errors(path: Path) -> Iterator[None]:
    """Add the path to an error of the block that names none: the system does not name what a descriptor stands for."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise

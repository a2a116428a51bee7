"""Files that appear under their final name complete, or not at all."""

from __future__ import annotations

import glob
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megalite.errors import CheckpointError, FileError

TEMPORARY = ".megalite.tmp"
DAY = 24 * 3600.0


class TemporaryFile:
    """Binary file that is written under a temporary path until `rename` gives it its final path. At the end of a `with`
    block it is removed if it was not renamed.

    Args:
        path: the final path. Missing folders are made.
        temporary: the temporary path, on the same file system; None: one in the same folder.
        size: number of bytes of an existing `temporary` to keep and append to; bytes after them are cut off.

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
        with self._reported():
            self._file.write(data)

    def flush(self) -> None:
        """Hand what was written to the operating system: after this, a kill of the process cannot lose it."""
        with self._reported():
            self._file.flush()

    def sync(self) -> None:
        """Close the file with everything on disk: after this, a crash of the machine cannot empty it."""
        with self._reported():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def rename(self) -> None:
        """Give the synced file its final name. A file that had this name is replaced."""
        with self._reported():
            os.replace(self.temporary, self.path)

    def close(self) -> None:
        """Close the file, without renaming or removing it."""
        with suppress(OSError):  # nobody relies on what could not be flushed (a full disk)
            self._file.close()

    def discard(self) -> None:
        """Close and remove the file if it was not renamed."""
        self.close()
        self.temporary.unlink(missing_ok=True)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FileError(
                f"writing {self.path} failed ({error.strerror}): free space or choose another output path"
            ) from error

    def __enter__(self) -> TemporaryFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def temporary_path(path: Path) -> Path:
    """Return a name in the folder of `path`, so that a rename is atomic; no process of any host shares it."""
    return path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}{TEMPORARY}")


def remove_leftovers(path: Path) -> None:
    """Remove files and folders that killed processes left under their `temporary_path`.

    Whether a process of another host is alive is unknown: its files are left over if not written to for a day.
    """
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
    """Write a complete file: at any moment, also after a crash, a reader finds the old file or the new one."""
    remove_leftovers(path)
    with TemporaryFile(path) as file:
        file.write(data)
        file.sync()
        file.rename()
    sync_directory(path.parent)


def write_at_once(path: Path, data: bytes) -> None:
    """Write as `write_atomically` does, but faster: without a sync, a crash of the machine may lose the file."""
    with TemporaryFile(path) as file:
        file.write(data)
        file.flush()
        file.rename()


def sync_directory(path: Path) -> None:
    """Write the names in a folder to disk, as `fsync` does for the contents of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with path_in_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def path_in_errors(path: Path) -> Iterator[None]:
    """Add the path to an OSError of the block that has none, such as an error from a file descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes into a folder, into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"writing {folder} failed: {error}. Free space, or choose another folder") from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a path to write to, which is renamed to `folder` at the end of the block and may replace an empty folder.

    Raises CheckpointError, and leaves nothing behind, if the disk fails.
    """
    temporary = temporary_path(folder)
    try:
        with writing(folder):
            remove_leftovers(folder)
            if folder.exists():
                folder.rmdir()  # fails now, before anything is written, if it cannot be replaced, such as a mount point
            temporary.mkdir(parents=True)
            yield temporary
            os.rename(temporary, folder)
            sync_directory(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

"""Atomic writes: a file or folder appears under its final name only when it is complete."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from megalite.errors import CheckpointError, ConfigurationError, FileError

TEMPORARY = ".megalite.tmp"
DAY = 24 * 3600.0
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


class TemporaryFile:
    """Binary file that is written under a temporary path until `rename` moves it to its final path.

    As a context manager, it removes the file at the end of the block if it was not renamed.

    Args:
        path: the final path. Missing parent folders of the temporary path are created.
        temporary: the temporary path, on the same file system as `path`; None: a path in the same folder.
        size: number of bytes of an existing `temporary` to keep. Later bytes are cut off, and writes append.

    Raises:
        FileError: the folder cannot be written to, or what has this name is no regular file.
    """

    def __init__(self, path: Path, temporary: Path | None = None, size: int = 0) -> None:
        self.path = path
        self.temporary = temporary or temporary_path(path)
        require_regular(path)
        try:
            self.temporary.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_itself(self.temporary, "r+b" if size else "wb")
            self._file.truncate(size)
            self._file.seek(size)
        except OSError as error:
            raise FileError(f"{path} cannot be written ({error.strerror}): choose another output path") from error

    def write(self, data: bytes) -> None:
        """Append data."""
        with writing_output(self.path):
            self._file.write(data)

    def flush(self) -> None:
        """Pass the written data to the operating system. After this, it is not lost if the process is killed."""
        with writing_output(self.path):
            self._file.flush()

    def sync(self) -> None:
        """Write all data to disk and close the file. After this, the data is not lost if the machine crashes."""
        with writing_output(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def rename(self) -> None:
        """Move the file to its final path, replacing a file of this name. Call `sync` or `flush` before."""
        with writing_output(self.path):
            os.replace(self.temporary, self.path)

    def close(self) -> None:
        """Close the file without renaming or removing it."""
        with suppress(OSError):  # data that cannot be flushed (full disk) is not needed: the file was not renamed
            self._file.close()

    def __enter__(self) -> TemporaryFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.temporary.unlink(missing_ok=True)  # it is there only if it was not renamed


def open_itself(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file for writing, but never what a link of this name leads to.

    Whoever may write to the folder could have put the link there, to have another file overwritten.

    Raises:
        OSError: it is a link, or cannot be opened.
    """

    def opened(name: str, flags: int) -> int:
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_NOCTTY, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                error.strerror = "it is a link, which is not followed: remove it"
            raise

    return open(path, mode, opener=opened, **options)


def lock_file(file: IO[Any] | int) -> str:
    """Lock an open file against other processes until it is closed.

    Returns what the file system says if it has no locks, and "" if the file is locked.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: it cannot be locked for another reason.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return os.strerror(error.errno)
    return ""


def require_regular(path: Path) -> None:
    """Raise FileError for a folder, a device or a pipe: a rename would put a file in its place."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileError(f"{path} is no regular file: choose another output path")


def require_output(flag: str, path: str | Path) -> None:
    """Raise ConfigurationError if a file cannot be written there. Called before the work whose results go into it."""
    folder = next(parent for parent in Path(path).absolute().parents if os.path.exists(parent))
    if os.path.exists(path) and not os.path.isfile(path):
        problem = "is no regular file"
    elif not folder.is_dir():
        problem = f"{folder} is no folder"
    else:
        try:
            with tempfile.TemporaryFile(dir=folder):
                return
        except OSError as error:
            problem = f"{folder} cannot be written to ({error.strerror})"
    raise ConfigurationError(f"{flag} {path}: {problem}: choose another path")


def temporary_path(path: Path) -> Path:
    """Return a name that is unique to this host and process, in the folder of `path` so that a rename is atomic."""
    return path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}{TEMPORARY}")


def remove_leftovers(path: Path) -> None:
    """Remove the files and folders that killed processes left under their `temporary_path`.

    A process on another host cannot be checked. Its files are removed if they were not written to for a day.
    """
    for left in path.parent.glob(f"{glob.escape(path.name)}.*{TEMPORARY}"):
        host, _, process = left.name[len(path.name) + 1 : -len(TEMPORARY)].rpartition(".")
        with suppress(OSError, ValueError):  # another process removed it first, or the name has no process ID
            here, folder = host == os.uname().nodename, left.is_dir()
            last_write = max(each.stat().st_mtime for each in (left, *(left.iterdir() if folder else ())))
            if (here and not _is_another_alive(int(process))) or last_write < time.time() - DAY:
                shutil.rmtree(left, ignore_errors=True) if folder else left.unlink()


def _is_another_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user: alive
        return True
    return process != os.getpid()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically: at any time, even after a crash, readers see either the old or the new content."""
    remove_leftovers(path)
    with TemporaryFile(path) as file:
        file.write(data)
        file.sync()
        file.rename()
    sync_directory(path.parent)


def write_at_once(path: Path, data: bytes) -> None:
    """Write a file atomically, without a sync: this is faster, but the file may be lost if the machine crashes."""
    with TemporaryFile(path) as file:
        file.write(data)
        file.flush()
        file.rename()


def sync_directory(path: Path) -> None:
    """Write a folder's entries to disk. A rename survives a crash only after this."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with path_in_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def path_in_errors(path: Path) -> Iterator[None]:
    """Add the path to an OSError of the block that has no path, such as an error from a file descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def writing_output(path: str | Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes a file, into a FileError."""
    try:
        yield
    except OSError as error:
        raise FileError(
            f"writing {path} failed ({error.strerror}): free space or choose another output path"
        ) from error


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes into a folder, into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"writing {folder} failed: {error}. Free space, or choose another folder") from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary path for a new folder, which is renamed to `folder` at the end of the block.

    An existing empty folder is replaced. If writing fails, the temporary folder is removed and CheckpointError raised.
    """
    temporary = temporary_path(folder)
    try:
        with writing(folder):
            remove_leftovers(folder)
            if folder.exists():
                folder.rmdir()  # fails before anything is written if it cannot be replaced, for example a mount point
            temporary.mkdir(parents=True)
            yield temporary
            os.rename(temporary, folder)
            sync_directory(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

"""Faults of file operations: each operation by which a process changes a folder is counted, and one of them fails.

An operation is a write (what the system is asked to write, not what stands in a buffer), a sync, a rename, an opening
for writing, a change of length, a making or a removing of a file or a folder, by any thread. The functions of `os` and
`open` are replaced while the faults are installed, so it does not matter how the code that is tested writes; code that
writes past Python is not seen, which `FileFaults.written` tells.
"""

from __future__ import annotations

import builtins
import io
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ONE_PATH = ("mkdir", "rmdir", "unlink", "remove", "truncate", "mknod")
_TWO_PATHS = ("rename", "replace", "link", "symlink")
_DESCRIPTOR = ("fsync", "fdatasync", "ftruncate", "posix_fallocate", "writev", "pwritev", "sendfile")
_DATA = ("write", "pwrite")
_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Operation:
    name: str
    """As in `fsync`, of the function of `os` that does it."""
    path: str
    """The file or folder; of two, the one that comes to be."""
    source: str | None = None
    """Of two, the other."""
    size: int = 0
    """Bytes, of a write."""

    def __str__(self) -> str:
        return f"{self.name} {self.path}{f' of {self.size} bytes' if self.size else ''}"


@dataclass(frozen=True)
class Moment:
    """An operation that is about to be made."""

    operation: Operation
    faults: FileFaults
    perform: Callable[[], Any]
    write_half: Callable[[], int] | None
    """Of a write: make it with half of the bytes."""


Fault = Callable[[Moment], Any]
"""What happens instead of an operation; the answer is the operation's."""


def kill(moment: Moment) -> None:
    """The process ends before the operation."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_midway(moment: Moment) -> None:
    """The process ends when half of a write is done, and after any other operation."""
    (moment.write_half or moment.perform)()
    kill(moment)


def cut_power(moment: Moment) -> None:
    """The process ends before the operation, and what was not synced by then is lost: half of a file, a new name."""
    moment.faults.lose_unsynced()
    kill(moment)


def write_less(moment: Moment) -> Any:
    """A write writes half of its bytes, and says so, as the system may; other operations are made."""
    return (moment.write_half or moment.perform)()


def fail_with(number: int) -> Fault:
    """The operation fails with an error number of the system; half of a write has been made by then."""

    def fail(moment: Moment) -> None:
        operation = moment.operation
        if moment.write_half is not None:
            moment.write_half()
        named = operation.name in (
            *_ONE_PATH,
            *_TWO_PATHS,
            "open",
        )  # the system names no file where it has a descriptor
        paths = (operation.source or operation.path, None, operation.source and operation.path) if named else ()
        raise OSError(number, os.strerror(number), *paths)

    return fail


class FileFaults:
    """While entered, counts the operations on `folder` and what is below it, and lets `fault` take the place of number
    `at` (from 0; None: of none), or of each from there on if it is `lasting`."""

    def __init__(
        self, folder: Path, at: int | None = None, fault: Fault | None = None, *, lasting: bool = False
    ) -> None:
        self.operations: list[Operation] = []
        self._folder = str(folder.absolute())
        self._fault, self._at, self._lasting = fault, at, lasting
        self._lock = threading.Lock()
        self._unsynced: set[tuple[int, int]] = set()  # device and inode
        self._written: dict[tuple[int, int], int] = {}  # bytes
        self._new_names: list[tuple[str, str]] = []  # source and target of renames of which the folder is not synced
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> FileFaults:
        for name in _ONE_PATH:
            self._replace(os, name, self._of_paths(name, 1))
        for name in _TWO_PATHS:
            self._replace(os, name, self._of_paths(name, 2))
        for name in (*_DESCRIPTOR, *_DATA):
            self._replace(os, name, self._of_descriptor(name))
        self._replace(os, "open", self._of_os_open())
        opening = self._of_open()
        self._replace(io, "open", opening)
        self._replace(builtins, "open", opening)
        return self

    def __exit__(self, *_: object) -> None:
        while self._replaced:
            module, name, real = self._replaced.pop()
            setattr(module, name, real)

    @property
    def struck(self) -> bool:
        """Whether it came to the fault."""
        return self._at is not None and len(self.operations) > self._at

    def written(self, path: Path) -> int:
        """How many bytes were written to the file that is at `path` now, whatever its name was then."""
        status = path.stat()
        return self._written.get((status.st_dev, status.st_ino), 0)

    def lose_unsynced(self) -> None:
        """Cut files that were written to since they were synced to half, and take back renames that were not."""
        for source, target in reversed(self._new_names):
            if os.path.exists(target) and not os.path.exists(source):
                self._real("rename")(target, source)
        for path in Path(self._folder).rglob("*"):
            status = path.stat()
            if path.is_file() and (status.st_dev, status.st_ino) in self._unsynced:
                self._real("truncate")(path, status.st_size // 2)

    def _real(self, name: str) -> Callable[..., Any]:
        return next(real for module, replaced, real in self._replaced if (module, replaced) == (os, name))

    def _replace(self, module: Any, name: str, watched: Callable[..., Any]) -> None:
        self._replaced.append((module, name, getattr(module, name)))
        setattr(module, name, watched)

    def concerns(self, path: str) -> bool:
        return path == self._folder or path.startswith(self._folder + "/")

    def make(
        self, operation: Operation, perform: Callable[[], Any], write_half: Callable[[], int] | None = None
    ) -> Any:
        """Count an operation and make it, or let the fault take its place."""
        with self._lock:
            number = len(self.operations)
            self.operations.append(operation)
        if self._fault is None or self._at is None or number < self._at or (number > self._at and not self._lasting):
            return perform()
        return self._fault(Moment(operation, self, perform, write_half))

    def note_write(self, descriptor: int, size: int) -> None:
        """A file is about to be written to."""
        identity = _identity(descriptor)
        self._unsynced.add(identity)
        self._written[identity] = self._written.get(identity, 0) + size

    def _note_sync(self, descriptor: int) -> None:
        self._unsynced.discard(_identity(descriptor))
        folder = _path_of(descriptor)
        self._new_names = [names for names in self._new_names if os.path.dirname(names[1]) != folder]

    def _of_paths(self, name: str, count: int) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            paths = [_absolute(path, options.get("dir_fd")) for path in arguments[:count]]
            if not any(map(self.concerns, paths)):
                return real(*arguments, **options)
            fresh = name == "rename" and not os.path.exists(paths[-1])
            operation = Operation(name, paths[-1], paths[0] if count == 2 else None)
            result = self.make(operation, lambda: real(*arguments, **options))
            if fresh:
                self._new_names.append((paths[0], paths[1]))
            return result

        return call

    def _of_descriptor(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(descriptor: int, *arguments: Any, **options: Any) -> Any:
            path = _path_of(descriptor)
            if not self.concerns(path):
                return real(descriptor, *arguments, **options)
            half: Callable[[], int] | None = None
            size = 0
            if name in _DATA:
                data = memoryview(arguments[0]).cast("B")
                size = len(data)
                half = lambda: real(descriptor, data[: size // 2], *arguments[1:])  # noqa: E731
            if name not in ("fsync", "fdatasync"):
                self.note_write(descriptor, size)
            result = self.make(Operation(name, path, size=size), lambda: real(descriptor, *arguments, **options), half)
            if name in ("fsync", "fdatasync"):
                self._note_sync(descriptor)
            return result

        return call

    def _of_os_open(self) -> Callable[..., int]:
        real = os.open

        def call(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            where = _absolute(path, options.get("dir_fd"))
            if not flags & _FOR_WRITING or not self.concerns(where):
                return real(path, flags, *arguments, **options)
            descriptor: int = self.make(Operation("open", where), lambda: real(path, flags, *arguments, **options))
            return descriptor

        return call

    def _of_open(self) -> Callable[..., Any]:
        real = io.open

        def call(
            file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, errors: str | None = None,
            newline: str | None = None, closefd: bool = True, opener: Any = None,
        ) -> Any:  # fmt: skip
            path = _path_of(file) if isinstance(file, int) else _absolute(file, None)
            if not set(mode) & set("wax+") or not self.concerns(path):
                return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
            raw_mode = mode.replace("b", "").replace("t", "")
            raw = self.make(Operation("open", path), lambda: _WatchedFile(file, raw_mode, closefd, opener))
            raw.watched_by, raw.path = self, path
            if buffering == 0:
                return raw
            size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
            buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw, size)
            if "b" in mode:
                return buffered
            return io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)

        return call


class _WatchedFile(io.FileIO):
    """What stands below every buffer."""

    watched_by: FileFaults
    path: str

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.watched_by.note_write(self.fileno(), len(view))
        operation = Operation("write", self.path, size=len(view))
        real = super().write
        written: int = self.watched_by.make(operation, lambda: real(view), lambda: real(view[: len(view) // 2]))
        return written

    def truncate(self, size: int | None = None) -> int:
        real = super().truncate
        length: int = self.watched_by.make(Operation("ftruncate", self.path), lambda: real(size))
        return length


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _absolute(path: Any, folder: int | None) -> str:
    if isinstance(path, int):
        return _path_of(path)
    text = os.fsdecode(path)
    return os.path.abspath(text if folder is None else os.path.join(_path_of(folder), text))

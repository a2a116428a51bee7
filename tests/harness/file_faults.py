"""Faults of file operations: each operation that changes a folder is counted, and one of them fails.

An operation is a write (a system call, not a write into a buffer), a sync, a rename, an opening for writing, a
truncation, or the creation or removal of a file or folder, by any thread. The functions of `os` and `open` are replaced
while the faults are installed, so all Python code that writes is covered. Code that writes without Python is not
counted; `FileFaults.written` shows this.
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
    """Name of the function of `os` that does it, such as `fsync`."""
    path: str
    """File or folder; for operations on two paths, the target."""
    source: str | None = None
    """Source, for operations on two paths."""
    size: int = 0
    """Bytes written, for a write."""

    def __str__(self) -> str:
        return f"{self.name} {self.path}{f' of {self.size} bytes' if self.size else ''}"


@dataclass(frozen=True)
class Moment:
    """Operation that is about to be executed."""

    operation: Operation
    faults: FileFaults
    perform: Callable[[], Any]
    write_half: Callable[[], int] | None
    """Function that executes a write with half of the bytes; None for other operations."""


Fault = Callable[[Moment], Any]
"""Replacement of an operation; its result is the result of the operation."""


def kill(moment: Moment) -> None:
    """Kill the process before the operation."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_midway(moment: Moment) -> None:
    """Kill the process after half of a write, or after any other operation."""
    (moment.write_half or moment.perform)()
    kill(moment)


def cut_power(moment: Moment) -> None:
    """Kill the process before the operation, and lose all that was not synced: half of each file, and new names."""
    moment.faults.lose_unsynced()
    kill(moment)


def write_less(moment: Moment) -> Any:
    """Write half of the bytes and return that number, as the system may; execute other operations."""
    return (moment.write_half or moment.perform)()


def fail_with(number: int) -> Fault:
    """Return a fault that fails with an error number of the system, after half of a write."""

    def fail(moment: Moment) -> None:
        operation = moment.operation
        if moment.write_half is not None:
            moment.write_half()
        named = operation.name in (
            *_ONE_PATH,
            *_TWO_PATHS,
            "open",
        )  # the system names no file if it has only a descriptor
        paths = (operation.source or operation.path, None, operation.source and operation.path) if named else ()
        raise OSError(number, os.strerror(number), *paths)

    return fail


class FileFaults:
    """Context that counts the operations on `folder` and below it, and replaces one of them by `fault`.

    `at`: number of that operation, from 0; None: no operation. `lasting`: replace also all later operations.
    """

    def __init__(
        self, folder: Path, at: int | None = None, fault: Fault | None = None, *, lasting: bool = False
    ) -> None:
        self.operations: list[Operation] = []
        self._folder = str(folder.absolute())
        self._fault, self._at, self._lasting = fault, at, lasting
        self._lock = threading.Lock()
        self._unsynced: set[tuple[int, int]] = set()  # device and inode
        self._written: dict[tuple[int, int], int] = {}  # bytes
        self._new_names: list[tuple[str, str]] = []  # source and target of renames without a sync of the folder
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
        """Tell whether the operation of the fault was reached."""
        return self._at is not None and len(self.operations) > self._at

    def written(self, path: Path) -> int:
        """Return the number of bytes written to the file that is now at `path`, whatever its name was then."""
        status = path.stat()
        return self._written.get((status.st_dev, status.st_ino), 0)

    def lose_unsynced(self) -> None:
        """Cut files that were written to after their last sync to half, and undo renames that were not synced."""
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
        """Count an operation and execute it, or its replacement by the fault."""
        with self._lock:
            number = len(self.operations)
            self.operations.append(operation)
        if self._fault is None or self._at is None or number < self._at or (number > self._at and not self._lasting):
            return perform()
        return self._fault(Moment(operation, self, perform, write_half))

    def note_write(self, descriptor: int, size: int) -> None:
        """Record that a file is about to be written to."""
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
    """Raw file below every buffer."""

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

"""Storage of checkpoints: a file system, or an object store that fsspec supports (s3://bucket/run, gs://...).

`ObjectPath` has the methods of `pathlib.Path` that an object store can support. A store cannot rename, append or sync,
and has no folders. An object appears complete when its upload ends, and replaces an older object of the same name.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from megalite import atomic_files
from megalite.config.checkpoint import is_url
from megalite.errors import CheckpointError, ConfigurationError, FileError
from megalite.small_files import MIB, read_small_file

BUFFER = 1 << 18
"""Size of the write buffer of a file in bytes, so that small tensors are written together."""


_CREDENTIALS = re.compile(r"(?<=://)\S*@")
_SECRETS = re.compile(r"(?i)([?&][^=&\s]*(?:sig|token|key|secret|password|credential)[^=&\s]*=)[^&\s]+")


def without_credentials(text: str) -> str:
    """Return a text that may leave the machine: its URLs without names, passwords, keys and signatures."""
    return _SECRETS.sub(r"\1...", _CREDENTIALS.sub("", text))


def place_of(path: AnyPath) -> str:
    """Return what a record may say of a place: its absolute path, or its URL without credentials."""
    return str(path.absolute()) if isinstance(path, Path) else without_credentials(str(path))


def open_directory(place: str) -> AnyPath:
    """Return the directory for the value of a flag: a path, or a URL that fsspec supports.

    Raises ConfigurationError if the URL is not valid, or if a package for its protocol is not installed. Raises
    CheckpointError if the client of the store cannot start.
    """
    if not is_url(place):
        return Path(place)
    protocol, _, rest = place.partition("://")
    if protocol in ("file", "local"):
        raise ConfigurationError(f"{place}: give the path itself, {rest}")
    if "::" in place or set(place) & set("*?["):
        raise ConfigurationError(f"{place}: a URL here is one protocol and a name without any of * ? [")
    from fsspec.core import url_to_fs  # imported here because it is slow and most runs do not need it

    url = place.rstrip("/")
    try:
        # Without a cache, a rank that has already listed a folder sees files that other ranks write later.
        file_system, key = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ImportError) else None
        advice = f": pip install {missing}" if missing else ""
        raise ConfigurationError(f"{place} needs a package that is not installed{advice} ({error})") from error
    except ValueError as error:
        raise ConfigurationError(f"{place} cannot be used: {error}") from error
    except Exception as error:  # clients raise any class of error, such as for missing credentials
        raise CheckpointError(f"{place} cannot be used: {type(error).__name__}: {error}") from error
    return ObjectPath(file_system, url, key.rstrip("/"))


@dataclass(frozen=True)
class ObjectStatus:
    st_size: int
    """Size in bytes."""


@dataclass(frozen=True)
class ObjectPath:
    """Object, or common prefix of the names of several objects. Every failure is an OSError that names the URL."""

    file_system: Any = field(repr=False)
    """File system of fsspec. It is Any because fsspec has no type annotations."""
    url: str
    """URL, as the user gave it."""
    key: str
    """Key of the object in `file_system`."""

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.file_system, f"{self.url}/{name}", f"{self.key}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.file_system, self.url.rpartition("/")[0], self.key.rpartition("/")[0])

    def resolve(self) -> ObjectPath:
        """Return this path, because a URL does not depend on the working directory."""
        return self

    def read_bytes(self, start: int | None = None, stop: int | None = None) -> bytes:
        """Read bytes [start, stop), by default all, with one request. Return fewer bytes if the object ends earlier."""
        with self._as_os_errors():
            data: bytes = self.file_system.cat_file(self.key, start=start, end=stop)
            return data

    def stat(self) -> ObjectStatus:
        with self._as_os_errors():
            return ObjectStatus(self.file_system.info(self.key)["size"])

    def modified(self) -> datetime:
        """Return the time of the last write. Raises OSError, also if the store does not report it."""
        with self._as_os_errors():
            when: datetime = self.file_system.modified(self.key)
            return when

    def is_file(self) -> bool:
        try:
            with self._as_os_errors():
                return bool(self.file_system.info(self.key)["type"] == "file")
        except FileNotFoundError:
            return False

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield the paths directly below this one. A path without any is not an error: stores have no empty folders."""
        return (self / name for name in self.listing())

    def listing(self) -> dict[str, int]:
        """Return the names directly below this path, sorted, each with its size in bytes.

        The size is 0 if there are further names below the name.
        """
        try:
            with self._as_os_errors():
                found = self.file_system.ls(self.key, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {entry["name"].rstrip("/"): entry["size"] or 0 for entry in found}
        prefix = f"{self.key}/".lstrip("/")  # in some stores keys begin with a slash, but not in all answers
        names = {name.lstrip("/").removeprefix(prefix): size for name, size in sizes.items() if name != self.key}
        return dict(sorted(names.items()))

    def put(self, data: bytes) -> None:
        """Write the whole object atomically: a reader always gets either the old object or the new one."""
        with self._as_os_errors():
            self.file_system.pipe_file(self.key, data)

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing, because object stores have no folders."""

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok or self.is_file():  # stores differ in how they remove an object that does not exist
            self.parent.remove([self.name])

    def remove(self, names: Collection[str]) -> None:
        """Remove the named objects directly below this path."""
        if names:
            with self._as_os_errors():
                self.file_system.rm([f"{self.key}/{name}" for name in names])

    @contextmanager
    def _as_os_errors(self) -> Iterator[None]:
        """Turn any error into an OSError, because the clients of stores raise errors of any class."""
        try:
            yield
        except Exception as error:
            number = errno.EPROTO
            if isinstance(error, FileNotFoundError):
                number = errno.ENOENT
            elif isinstance(error, PermissionError):
                number = errno.EACCES
            text = f"{os.strerror(number) if number != errno.EPROTO else type(error).__name__}: {error}"
            raise OSError(number, text, self.url) from error


AnyPath = Path | ObjectPath


class Writer(Protocol):
    """Stream to write to, as `create` yields it."""

    def write(self, data: bytes | memoryview, /) -> int: ...


class _Upload:
    def __init__(self, path: ObjectPath, file: Any) -> None:
        self._path, self._file = path, file

    def write(self, data: bytes | memoryview) -> int:
        with self._path._as_os_errors():
            return int(self._file.write(data))


@contextmanager
def create(path: AnyPath) -> Iterator[Writer]:
    """Yield a new file. After the block it is on disk, or in the store. Raises OSError if this fails.

    If the block fails, the upload to an object store is cancelled, and no object appears.
    """
    if isinstance(path, Path):
        with atomic_files.path_in_errors(path), path.open("xb", buffering=BUFFER) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        return
    with path._as_os_errors():
        upload = path.file_system.open(path.key, "wb")
    try:
        yield _Upload(path, upload)
        with path._as_os_errors():
            upload.close()
    except BaseException:
        with suppress(Exception):
            upload.discard()
        with suppress(Exception):
            upload.closed = True  # otherwise, fsspec would upload the contents when the file is garbage-collected
        raise


def write_atomically(path: AnyPath, data: bytes) -> None:
    """Write a whole file atomically: a reader always gets either the old file or the new one.

    Raises FileError.
    """
    if isinstance(path, Path):
        atomic_files.write_atomically(path, data)
        return
    try:
        path.put(data)
    except OSError as error:
        raise FileError(f"{path} cannot be written ({error.strerror}): choose another output path") from error


def read_small(path: AnyPath, *, largest: int) -> bytes:
    """Read a whole file of at most `largest` bytes.

    Raises OSError if it cannot be read, and ValueError if it is larger or not a regular file.
    """
    if isinstance(path, Path):
        return read_small_file(path, largest=largest)
    if path.stat().st_size > largest:
        raise ValueError(f"larger than its limit of {largest / MIB:g} MiB")
    return path.read_bytes()


def sizes(folder: AnyPath, names: Collection[str]) -> dict[str, int]:
    """Return the sizes in bytes of the named files that exist in a folder. Raises OSError if it cannot be read."""
    if isinstance(folder, ObjectPath) and len(names) > 1:
        found = folder.listing()  # one request for all files
        return {name: found[name] for name in names if name in found}
    found = {}
    for name in names:
        with suppress(FileNotFoundError):
            found[name] = (folder / name).stat().st_size
    return found

"""Cache on disk for computed arrays, which are found by a description of their inputs and mapped into memory.

    {directory}/{key}/description.json      description of the inputs, and the CRC-32 of each file
    {directory}/{key}/{name}.npy            an array

The key is a hash of the description. The description has hashes of contents and no paths: data that is moved keeps its
indices, and changed data gets new ones. A complete folder gets its name by one rename. A process that is killed
therefore leaves either no folder or a complete one. The lock only prevents the processes of a node from doing the same
work. If it has no effect (on a network file system without locks), several processes compute the same arrays, and one
folder is kept.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from megalite.atomic_files import lock_file, remove_leftovers, temporary_path
from megalite.data.mapped_file import map_file, refuse_too_many_open_files
from megalite.small_files import MIB, read_json

_LOCK_SECONDS = 3600.0  # longer than any computation of arrays
_LARGEST = 16 * MIB
"""Largest description in bytes; it has a few hundred bytes per dataset."""

Arrays = Mapping[str, np.ndarray]


class IndexCache:
    """Cache of arrays, which are found by a description of their inputs.

    Args:
        directory: directory to store them in; None: a folder `cache` next to the data that they belong to.

    Attributes:
        notes: messages for the user about arrays that could not be stored or were damaged.
    """

    def __init__(self, directory: str | None = None) -> None:
        self.directory = directory
        self.notes: list[str] = []

    def get(self, data_path: str, description: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """Return the arrays that `build` computes, read-only, from disk if they are stored there.

        Args:
            data_path: path of the data that they belong to.
            description: everything that they depend on, as JSON values.
            build: function that computes them.
        """
        directory = Path(self.directory) if self.directory else Path(data_path).parent / "cache"
        text = json.dumps(description, sort_keys=True)
        folder = directory / hashlib.sha256(text.encode()).hexdigest()[:32]
        arrays = self._load(folder, text)
        if arrays is not None:
            return arrays
        with _lock(folder):
            arrays = self._load(folder, text)  # another process may have been faster
            return self._keep(folder, text, build()) if arrays is None else arrays

    def _load(self, folder: Path, description: str) -> Arrays | None:
        """Return the memory-mapped arrays of a folder, or None with a note that says what is wrong with it."""
        try:
            record = read_json(folder / "description.json", largest=_LARGEST)
            if record["description"] != description:
                raise ValueError("it describes other arrays")
            return {name: _map_array(folder / f"{name}.npy", crc) for name, crc in record["crc32"].items()}
        except (FileNotFoundError, NotADirectoryError):
            if folder.exists():
                self._note(f"{folder} was not complete and is computed again")
        except OSError as error:
            refuse_too_many_open_files(error)
            self._note(f"{folder} cannot be read ({error.strerror}) and is computed again")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._note(f"{folder} was damaged ({error}) and is computed again")
        return None

    def _keep(self, folder: Path, description: str, arrays: Arrays) -> Arrays:
        """Write the folder in one step and return its arrays, mapped; without a place to write, the given ones."""
        temporary = temporary_path(folder)
        try:
            remove_leftovers(folder)
            _write(temporary, description, arrays)
            try:
                os.rename(temporary, folder)
            except OSError:
                # The existing folder is damaged, or another node was faster and has mapped its files. Such a folder is
                # kept.
                if self._load(folder, description) is None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.rename(temporary, folder)
        except OSError as error:
            refuse_too_many_open_files(error)
            self._note(
                f"sample indices cannot be kept in {folder.parent} ({error.strerror}), so each process computes them "
                "in memory at every start: give --data-cache-path, a directory that can be written"
            )
            return arrays
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return self._load(folder, description) or arrays

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes.

    A process that dies releases the lock. A process that hangs blocks the others for at most `_LOCK_SECONDS`.
    """
    path = folder.with_name(f"{folder.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another file at this path must not be truncated, and a link or a pipe must not be followed or waited for.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
    except OSError:  # if the lock cannot be created, the arrays cannot be stored either: `_keep` notes this
        yield
        return
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if regular:
            with suppress(OSError):
                _await_lock(descriptor)
        yield
        if regular:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _await_lock(descriptor: int) -> None:
    """Wait for the lock, if there are locks and as long as it pays. Raises OSError if the file cannot be locked."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            lock_file(descriptor)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                return
        time.sleep(0.05)


def _write(folder: Path, description: str, arrays: Arrays) -> None:
    folder.mkdir()
    checksums = {}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
        checksums[name] = zlib.crc32(map_file(folder / f"{name}.npy").data)
    record = {"description": description, "crc32": checksums}
    (folder / "description.json").write_text(json.dumps(record))


def _map_array(path: Path, crc32: int) -> np.ndarray:
    data = map_file(path)
    if zlib.crc32(data.data) != crc32:
        raise ValueError(f"{path.name} has another checksum than recorded")
    # np.load would keep a file descriptor.
    header = io.BytesIO(data[: 1 << 16].tobytes())
    np.lib.format.read_magic(header)
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(header)
    return data[header.tell() :].view(dtype).reshape(shape, order="F" if fortran_order else "C")

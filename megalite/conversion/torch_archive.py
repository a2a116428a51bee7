"""Reader of files of `torch.save`. It does not use torch's own loader, which can run a TorchScript program.

An archive is an uncompressed zip file with one folder. `data.pkl` is a pickle, in which tensors refer to storages by
name. `data/NAME` has the bytes of a storage. Before torch 1.6, a file was a series of pickles (a magic number, a
version, the machine, the saved object, the names of the storages), followed by the length and bytes of each storage.
"""

from __future__ import annotations

import io
import mmap
import re
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from megalite.restricted_pickle import Storage, load, unreadable
from megalite.small_files import LARGEST, MIB, open_regular

_NAMES = re.compile(
    r"data\.pkl|data/\w+|version|byteorder|\.data/serialization_id|\.format_version|\.storage_alignment"
)
_LOCAL_HEADER = struct.Struct("<4s22x2H")
_LARGEST_LIST = 16 * MIB
"""Maximum size in bytes of the central directory of an archive; an entry takes about a hundred bytes."""
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001


def read_torch_file(path: Path, start: int = 0, length: int | None = None, *, folder: Path | None = None) -> Any:
    """Return the object that `torch.save` has written to a file, or to `length` bytes from `start` on.

    Tensors are returned as `StoredTensor`s. `folder`: as for `open_regular`. Raises CheckpointError.
    """
    try:
        with open_regular(path, folder=folder) as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        stop = len(content) if length is None else start + length
        if not 0 <= start < stop <= len(content):
            raise ValueError("it was cut off")
        content = content[start:stop]
        return _read_archive(content) if bytes(content[:4]) == b"PK\3\4" else _read_pickles(content)
    except Exception as error:  # a foreign file can cause any error
        raise unreadable(path, error) from error


class _Window(io.RawIOBase):
    """File-like view of bytes for `zipfile`, which reads the central directory of the archive at once."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._at = content, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._content))[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        part = self._content[self._at : self._at + size if size >= 0 else None]
        if len(part) > _LARGEST_LIST:
            raise ValueError(f"its list of parts is larger than {_LARGEST_LIST / MIB:g} MiB")
        self._at += len(part)
        return bytes(part)


def _read_archive(content: memoryview) -> Any:
    """Return the object in an archive. Raises ValueError if it is not one that torch.save writes."""
    entries: dict[str, zipfile.ZipInfo] = {}
    folders = set()
    with zipfile.ZipFile(cast(BinaryIO, _Window(content))) as archive:
        for entry in archive.infolist():
            folder, _, name = entry.filename.partition("/")
            folders.add(folder)
            if not _NAMES.fullmatch(name) or name in entries or len(folders) > 1:
                raise ValueError(f"it has {entry.filename[:80]!r}, which no file of tensors has")
            if entry.compress_type or entry.flag_bits & 1 or entry.file_size != entry.compress_size:
                raise ValueError("a part of it is compressed, which torch.save never does")
            entries[name] = entry

    def part(name: str) -> memoryview:
        entry = entries[name]
        signature, *lengths = _LOCAL_HEADER.unpack(content[entry.header_offset :][: _LOCAL_HEADER.size])
        first = entry.header_offset + _LOCAL_HEADER.size + sum(lengths)
        if entry.header_offset < 0 or signature != b"PK\3\4" or first + entry.file_size > len(content):
            raise ValueError(f"its part {name} is not within it")
        return content[first : first + entry.file_size]

    storages: dict[str, Storage] = {}

    def storage(described: Any) -> Storage:
        found = _described(described, storages)
        found.values = part(f"data/{described[2]}")
        if len(found.values) != found.length * found.dtype.itemsize:
            raise ValueError(f"its part data/{described[2]} has another size than its tensors")
        return found

    if "byteorder" in entries and bytes(part("byteorder")[:8]) != b"little":
        raise ValueError("its numbers are big-endian")
    pickled = part("data.pkl")
    if len(pickled) > LARGEST:
        raise ValueError(f"its data.pkl is larger than {LARGEST / MIB:g} MiB")
    return load(io.BytesIO(pickled), storage)


def _described(described: Any, storages: dict[str, Storage]) -> Storage:
    """Return the storage that a pickle describes. The same name always gives the same object."""
    if type(described) is not tuple or len(described) not in (5, 6):  # unpacking a long one each time would be slow
        raise ValueError("a tensor's storage is described in another way")
    kind, dtype, name, _, length, *view = described
    if kind != "storage" or type(dtype) is not torch.dtype or type(name) is not str or type(length) is not int:
        raise ValueError("a tensor's storage is described in another way")
    found = storages.setdefault(name, Storage(dtype, length))
    if (found.dtype, found.length) != (dtype, length) or any(view):
        raise ValueError("a tensor's storage is described in two ways")
    return found


def _read_pickles(content: memoryview) -> Any:
    """Return the object in a file from before torch 1.6. Raises ValueError if it is not one."""
    stream = io.BytesIO(content[:LARGEST])
    storages: dict[str, Storage] = {}
    if load(stream) != _MAGIC or load(stream) != _VERSION:
        raise ValueError("it is not a file of torch.save")
    if load(stream)["little_endian"] is not True:
        raise ValueError("its numbers are big-endian")
    found = load(stream, lambda described: _described(described, storages))
    names = load(stream)
    if not isinstance(names, list) or not all(isinstance(name, str) and name in storages for name in names):
        raise ValueError("its list of storages is not valid")
    at = stream.tell()
    for name in names:
        storage = storages[name]
        size = storage.length * storage.dtype.itemsize
        length, storage.values = int.from_bytes(content[at : at + 8], "little"), content[at + 8 : at + 8 + size]
        if length != storage.length or len(storage.values) != size:
            raise ValueError("it was cut off")
        at += 8 + size
    if len(storages) != len(set(names)):
        raise ValueError("its list of storages leaves some out")
    return found

"""Files for torch.distributed.checkpoint (DCP). Each box is a separate archive, as `torch.save` writes it.

An archive is a zip file that stores the bytes of the box uncompressed, and a pickle that describes the tensor. All
other bytes depend only on the dtype and size of the box, and on its CRC-32. The length of an archive is a multiple of
64 bytes, so that it has the same bytes at any position. Zip:
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megalite.checkpoint.tensors import ByteRange, TensorBox
from megalite.torch_internals import rebuild_tensor, storage_info

_ALIGNMENT = 64  # bytes, as torch.save uses it, so that the tensors of a memory-mapped file are aligned

_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
    torch.int64: torch.LongStorage,
}


def byte_ranges(parts: Sequence[TensorBox]) -> list[ByteRange]:
    """Return the byte ranges of the parts of a file, in order. No box may be empty."""
    found = []
    end = 0
    for part in parts:
        before, after = _archive(part.dtype, part.box.size)
        start = end + len(before)
        stop = start + part.size
        found.append(ByteRange(before, start, stop, after))
        end = stop + len(after(0))
    return found


def metadata(files: Mapping[str, Sequence[tuple[TensorBox, ByteRange]]]) -> bytes:
    """Return the contents of the `.metadata` file of a folder, a pickle. Equal `files` give equal bytes.

    `files`: the parts of each file with their byte ranges, by file name.
    """
    # Imported here because it takes a second and only one rank needs it. DCP's format includes these class names.
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
    from torch.distributed.checkpoint.metadata import (
        STORAGE_TYPES,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    boxes: dict[str, list[tuple[str, TensorBox, ByteRange]]] = {}
    for file, placed in files.items():
        for part, byte_range in placed:
            boxes.setdefault(part.name, []).append((file, part, byte_range))
    tensors: dict[str, STORAGE_TYPES] = {}
    stored = {}
    for name, parts in boxes.items():  # one string object per name: pickle writes equal but distinct strings twice
        chunks = []
        for file, part, byte_range in parts:
            offset = torch.Size(part.box.offset)
            chunks.append(ChunkStorageMetadata(offset, torch.Size(part.box.size)))
            start, stop = byte_range.start - len(byte_range.before), byte_range.stop + len(byte_range.after(0))
            stored[MetadataIndex(name, offset)] = storage_info(file, start, stop - start)
        _, part, _ = parts[0]
        tensors[name] = TensorStorageMetadata(TensorProperties(part.dtype), torch.Size(part.shape), chunks)
    # Tools that build a nested state dict read in planner_data which keys lead to a tensor: here it is one key.
    keys = {name: (name,) for name in tensors}
    described = Metadata(tensors, planner_data=keys, storage_data=stored, version=CURRENT_DCP_VERSION)
    return pickle.dumps(described, protocol=4)  # the default protocol depends on the Python version


# ---------------------------------------------------------------------------------------------------- an archive

_BYTES = b"archive/data/0"


@functools.lru_cache(maxsize=1024)  # many boxes of a model have the same dtype and size
def _archive(dtype: torch.dtype, size: tuple[int, ...]) -> tuple[bytes, Callable[[int], bytes]]:
    """Return `before` and `after` of a `ByteRange`: the bytes before a box, and the function for the bytes after it."""
    before = directory = b""
    for name, content in ((b"data.pkl", _description(dtype, size)), (b"byteorder", b"little"), (b"version", b"3\n")):
        name = b"archive/" + name
        checksum = zlib.crc32(content)
        directory += _directory_entry(name, len(before), len(content), checksum)
        before += _header(name) + content + _descriptor(len(content), checksum)
    header_start = len(before)
    before += _header(_BYTES, padding=-(header_start + len(_header(_BYTES))) % _ALIGNMENT)
    length = math.prod(size) * dtype.itemsize

    def after(checksum: int) -> bytes:
        descriptor = _descriptor(length, checksum)
        entries = directory + _directory_entry(_BYTES, header_start, length, checksum)
        return descriptor + entries + _end(len(before) + length + len(descriptor), len(entries), count=4)

    return before, after


def _description(dtype: torch.dtype, size: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump(_Tensor(dtype, size))
    return file.getvalue()


@dataclass(frozen=True)
class _Storage:
    """Placeholder for the bytes of a tensor in a pickle."""

    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class _Tensor:
    """Placeholder that is pickled as `torch.save` pickles a contiguous tensor on the CPU."""

    dtype: torch.dtype
    size: tuple[int, ...]

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[object, ...]]:
        strides = tuple(math.prod(self.size[dimension + 1 :]) for dimension in range(len(self.size)))
        storage = _Storage(self.dtype, math.prod(self.size))
        return rebuild_tensor(), (storage, 0, self.size, strides, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, pickled: Any) -> tuple[object, ...] | None:
        if not isinstance(pickled, _Storage):
            return None
        return "storage", _STORAGES[pickled.dtype], "0", "cpu", pickled.numel


# ---------------------------------------------------------------------------------------------------- zip
# All entries use zip64, the form for files beyond 4 GiB, and have their checksum and sizes after the bytes, in a data
# descriptor. The checksum of a box is known only after its bytes are written; one form for all entries is simpler.

_VERSION = 45  # version 4.5 of the zip format, the first with zip64
_FIELDS = (_VERSION, 1 << 3, 0, 0, 1 << 5 | 1)  # flag of a data descriptor; uncompressed; 1980-01-01 0:00
_IN_ZIP64 = 0xFFFFFFFF


def _header(name: bytes, padding: int = 0) -> bytes:
    extra = struct.pack("<HHQQ", 1, 16, 0, 0) + struct.pack("<2sH", b"FB", padding) + bytes(padding)
    fields = struct.pack("<4s5H3I2H", b"PK\3\4", *_FIELDS, 0, _IN_ZIP64, _IN_ZIP64, len(name), len(extra))
    return fields + name + extra


def _descriptor(length: int, checksum: int) -> bytes:
    return struct.pack("<4sI2Q", b"PK\7\10", checksum, length, length)


def _directory_entry(name: bytes, header_start: int, length: int, checksum: int) -> bytes:
    extra = struct.pack("<HHQQ", 1, 16, length, length)
    sizes = (_IN_ZIP64, _IN_ZIP64, len(name), len(extra))
    fields = (b"PK\1\2", _VERSION, *_FIELDS, checksum, *sizes, 0, 0, 0, 0, header_start)
    return struct.pack("<4s6H3I5H2I", *fields) + name + extra


def _end(directory_start: int, directory_length: int, count: int) -> bytes:
    """Return the end of an archive, with a comment of spaces as padding."""
    stop = directory_start + directory_length
    zip64 = struct.pack(
        "<4sQ2H2I4Q", b"PK\6\6", 44, _VERSION, _VERSION, 0, 0, count, count, directory_length, directory_start
    ) + struct.pack("<4sIQI", b"PK\6\7", 0, stop, 1)
    record = struct.Struct("<4s4H2IH")
    padding = -(stop + len(zip64) + record.size) % _ALIGNMENT
    fields = (b"PK\5\6", 0, 0, count, count, directory_length, _IN_ZIP64, padding)
    return zip64 + record.pack(*fields) + b" " * padding

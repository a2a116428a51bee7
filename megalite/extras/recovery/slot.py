"""A slot in memory: an anonymous file with one copy of all that a rank holds, and the manifest that describes it.

The file has a header, the bytes of the boxes, and the manifest. The header is cleared before anything else changes, and
written last: a copy is either whole, or there is none. Whoever holds the file open (the agent of the node) keeps it.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.checkpoint import manifest, shard_file
from megalite.checkpoint.manifest import Manifest, SavedFile, SavedTensor
from megalite.checkpoint.tensors import ByteRange, TensorBox
from megalite.errors import CorruptCheckpointError, MegaliteError
from megalite.extras.recovery.marks import PAGE

FOLDER = Path("/proc/self/fd")
"""Folder in which the files of a process without names have names: their descriptors."""
HEADER = PAGE
"""Size in bytes of the header, with the room behind it up to the next page."""
_ROOM = 1 << 16
"""Bytes by which a manifest may grow, since the numbers of its training state do."""
_FIELDS = struct.Struct("<8s16s16sQQQQQQI")
_MAGIC, _ALIGNMENT, _FILE = b"megacopy", 64, "copy"


class Whose(NamedTuple):
    """Owner of a copy: a rank, in one start of a run's ranks."""

    run: bytes
    """Digest of the run's flags without those of the layout, 16 bytes."""
    layout: bytes
    """Digest of the layout, with the number of ranks, 16 bytes."""
    world_size: int
    rank: int
    mark: int
    """Random number of the start of the ranks that took it: other starts may have another state at the same step."""


@dataclass(frozen=True)
class Header:
    """Description of the copy in a slot."""

    whose: Whose
    step: int
    start: int
    """Position of the first byte of the manifest."""
    stop: int
    """Position after its last byte, the last of the copy."""
    checksum: int
    """CRC-32 of the manifest."""

    def to_bytes(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, *self.whose, self.step, self.start, self.stop, self.checksum)
        return fields + zlib.crc32(fields).to_bytes(4, "little")

    @staticmethod
    def from_bytes(data: bytes) -> Header | None:
        """Return the header, or None if there is no whole one."""
        fields, checksum = data[: _FIELDS.size], data[_FIELDS.size : _FIELDS.size + 4]
        if len(checksum) != 4 or zlib.crc32(fields) != int.from_bytes(checksum, "little"):
            return None
        magic, *values = _FIELDS.unpack(fields)
        return Header(Whose(*values[:5]), *values[5:]) if magic == _MAGIC else None


HEADER_BYTES = _FIELDS.size + 4


class Slot:
    """One slot. Only its process writes to it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> None:
        """Make room for `size` bytes, header included, with all pages present. A copy that is there remains.

        Raises OSError if there is no memory.
        """
        size = -(-max(size, os.fstat(self.descriptor).st_size) // mmap.PAGESIZE) * mmap.PAGESIZE
        if size == len(self._memory):
            return
        os.ftruncate(self.descriptor, size)
        os.posix_fallocate(self.descriptor, 0, size)
        self._map = mmap.mmap(self.descriptor, size)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def memory(self) -> Tensor:
        """The bytes of the file [size], shared with it; those of an earlier size if it was not allocated since."""
        return self._memory

    def header(self) -> Header | None:
        """Return the header of the copy; None if there is no copy with a whole manifest."""
        found = Header.from_bytes(os.pread(self.descriptor, HEADER_BYTES, 0))
        if found is None or not HEADER <= found.start <= found.stop <= os.fstat(self.descriptor).st_size:
            return None
        return found if zlib.crc32(self._text(found)) == found.checksum else None

    def _text(self, header: Header) -> bytes:
        return os.pread(self.descriptor, header.stop - header.start, header.start)

    def discard(self) -> None:
        """Make the slot empty. What is written from here on is no copy until `commit`."""
        os.pwrite(self.descriptor, bytes(HEADER_BYTES), 0)

    def release(self) -> None:
        """Give the memory back."""
        self._memory, self._map = torch.empty(0, dtype=torch.uint8), None
        os.ftruncate(self.descriptor, 0)

    def commit(self, header: Header) -> None:
        """Declare that the bytes are the copy of this header."""
        os.pwrite(self.descriptor, header.to_bytes(), 0)

    def text(self) -> str:
        """Return the manifest of the copy, as text; "" if there is no copy."""
        header = self.header()
        return "" if header is None else self._text(header).decode()

    def manifest(self) -> Manifest:
        """Return the manifest of the copy, as of a checkpoint in `FOLDER`; see `manifest_of` for errors."""
        return manifest_of(self.text(), str(self.descriptor), os.fstat(self.descriptor).st_size)

    def is_intact(self) -> bool:
        """Tell whether every byte of the copy has its checksum."""
        try:
            described = self.manifest()
            buffer = bytearray(manifest.BLOCK)
            with shard_file.open_to_read(FOLDER / str(self.descriptor), os.fstat(self.descriptor).st_size) as file:
                for tensor in described.tensors.values():
                    for block in (block for saved in tensor.boxes for block in saved.blocks()):
                        shard_file.read_block(file, block, memoryview(buffer)[: block.size])
        except CorruptCheckpointError:
            return False
        return True


def manifest_of(text: str, file: str, size: int) -> Manifest:
    """Return the manifest of a copy from its text. `file`, `size`: the name and the bytes that its file is to have.

    Raises CorruptCheckpointError if there is no copy, or its manifest cannot be used.
    """
    try:
        if not text:
            raise ValueError("its manifest is damaged")
        read = Manifest.from_json(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{FOLDER / file}: {error}") from error
    tensors = {name: _in_file(saved, file) for name, saved in read.tensors.items()}
    return replace(read, files={file: SavedFile(size, 0)}, tensors=tensors)


def _in_file(saved: SavedTensor, file: str) -> SavedTensor:
    return replace(saved, boxes=tuple(replace(each, file=file) for each in saved.boxes))


def byte_ranges(parts: Sequence[TensorBox]) -> list[ByteRange]:
    """Return the positions of parts in a slot, in their order."""
    rooms = (-(-part.size // _ALIGNMENT) * _ALIGNMENT for part in parts)
    starts = accumulate(rooms, initial=HEADER)
    return [ByteRange(b"", start, start + part.size, lambda _: b"") for part, start in zip(parts, starts, strict=False)]


def describe(parts: Sequence[TensorBox], checksums: Sequence[shard_file.Checksums], described: Manifest) -> bytes:
    """Return the manifest of a copy of these parts. `described`: a manifest with the rest of its fields."""
    placed = {_FILE: list(zip(parts, byte_ranges(parts), strict=True))}
    sums = {(_FILE, where.start): each for (_, where), each in zip(placed[_FILE], checksums, strict=True)}
    files, tensors = shard_file.records(placed, sums)
    return replace(described, files=files, tensors=tensors).to_json().encode()


def size_of(parts: Sequence[TensorBox], described: Manifest) -> int:
    """Return the bytes that a slot needs for these parts and their manifest. `described`: as for `describe`."""
    ranges = byte_ranges(parts)
    blank = [tuple(0 for _ in range(0, part.size, manifest.BLOCK)) for part in parts]
    return (ranges[-1].stop if ranges else HEADER) + len(describe(parts, blank, described)) + _ROOM


def checksums_of(values: Tensor) -> shard_file.Checksums:
    """Return the checksums of a box whose bytes [size] are in memory."""
    running = accumulate(shard_file.blocks_of(values), lambda before, data: zlib.crc32(data, before), initial=0)
    return tuple(running)[1:]


def seal(slot: Slot, whose: Whose, parts: Sequence[TensorBox], described: Manifest) -> Header:
    """Make the bytes of the parts, which are in the slot, a copy: with checksums and manifest, and then the header.

    `described`: a manifest with the training state and the configuration.
    """
    ranges = byte_ranges(parts)
    sums = [checksums_of(slot.memory[where.start : where.stop]) for where in ranges]
    text = describe(parts, sums, described)
    start = ranges[-1].stop if ranges else HEADER
    if start + len(text) > len(slot.memory):
        raise MegaliteError(f"the manifest of a copy in memory has grown to {len(text)} bytes: please report it")
    os.pwrite(slot.descriptor, text, start)
    header = Header(whose, described.training.iteration, start, start + len(text), zlib.crc32(text))
    slot.commit(header)
    return header

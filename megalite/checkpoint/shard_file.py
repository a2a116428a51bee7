"""Files of boxes. They are written as a stream with checksums, and read in blocks that are verified."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

import torch
from torch import Tensor

from megalite.checkpoint import manifest
from megalite.checkpoint.formats import Format, Placed
from megalite.checkpoint.integrity import CorruptFileError, check_size, unreadable
from megalite.checkpoint.manifest import Block, SavedBox, SavedFile, SavedTensor
from megalite.checkpoint.tensors import ByteRange
from megalite.errors import CheckpointError
from megalite.storage import AnyPath, ObjectPath, Writer, create

_ALONE = 1 << 16  # up to this many bytes, computing the checksum takes less time than using another thread


Checksums = tuple[int, ...]
"""Checksums of the blocks of a box, as in `SavedBox`."""


def write(stream: Writer, boxes: Iterable[tuple[ByteRange, Tensor]], closed: Event | None = None) -> list[Checksums]:
    """Write boxes in the order of their byte ranges, and return the checksums of each box.

    A second thread computes the checksums, with at most one block in its queue. A tensor on a device is copied to the
    host block by block. Raises OSError if the disk fails, and CheckpointError after `closed` is set.
    """
    checksums: list[Checksums] = []
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as thread:
        for byte_range, values in boxes:
            stream.write(byte_range.before)
            sums: list[Callable[[], int]] = []
            for data in blocks_of(values):
                if closed is not None and closed.is_set():
                    raise CheckpointError("the run ended before the checkpoint was written")
                sums.append(_checksum(thread, data, sums[-1]() if sums else 0))
                stream.write(data)
            checksums.append(tuple(checksum() for checksum in sums))
            stream.write(byte_range.after(checksums[-1][-1]))
    return checksums


def _checksum(thread: ThreadPoolExecutor, data: memoryview, before: int) -> Callable[[], int]:
    """Begin to compute the running CRC-32 that includes `data`, and return the function that waits for it."""
    if len(data) <= _ALONE:
        checksum = zlib.crc32(data, before)
        return lambda: checksum
    return thread.submit(zlib.crc32, data, before).result


def records(
    placed: Placed, checksums: Mapping[tuple[str, int], Checksums]
) -> tuple[dict[str, SavedFile], dict[str, SavedTensor]]:
    """Return the manifest's records of written files and of the tensors in them.

    `checksums`: those of each box, by the file and the position of its first byte.
    """
    files: dict[str, SavedFile] = {}
    boxes: dict[str, list[SavedBox]] = {}
    for file, parts in placed.items():
        around = 0
        for part, byte_range in parts:
            sums = checksums[file, byte_range.start]
            saved = SavedBox(
                part.name, part.shape, part.dtype, part.box, file, byte_range.start, sums, relayout=part.relayout
            )
            boxes.setdefault(part.name, []).append(saved)
            after = byte_range.after(sums[-1])
            around = zlib.crc32(after, zlib.crc32(byte_range.before, around))
        files[file] = SavedFile(byte_range.stop + len(after), around)
    return files, {
        name: SavedTensor(found[0].shape, found[0].dtype, tuple(found), relayout=found[0].relayout)
        for name, found in boxes.items()
    }


def write_index(folder: AnyPath, file_format: Format, placed: Placed) -> dict[str, SavedFile]:
    """Write the index files that other programs need to read the checkpoint, and return their records."""
    files: dict[str, SavedFile] = {}
    for name, data in file_format.index(placed).items():
        with create(folder / name) as stream:
            stream.write(data)
        files[name] = SavedFile(len(data), zlib.crc32(data))
    return files


def blocks_of(values: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of values, in blocks of which each has a checksum."""
    flat = values.detach().flatten().contiguous()
    flat = flat.as_strided(flat.shape, (1,))  # a tensor of one element may have a stride other than 1
    step = manifest.BLOCK // flat.itemsize
    for start in range(0, flat.numel(), step):
        yield bytes_of(flat[start : start + step].cpu())


def bytes_of(values: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return values.view(-1).view(torch.uint8).numpy().data


# ------------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class OpenFile:
    """File or object of a checkpoint, open for reading. Any thread may read from it."""

    path: AnyPath
    descriptor: int
    """File descriptor; -1 for an object."""

    @property
    def piece(self) -> int:
        """Number of bytes per read.

        For a file, it is so small that the bytes are still in the CPU cache when their checksum is computed. For an
        object, it is one block, because each read is a request.
        """
        return manifest.BLOCK if isinstance(self.path, ObjectPath) else 1 << 18

    def read(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from position `start` on. Raises CorruptFileError or CheckpointError."""
        with _reported(self.path):
            if isinstance(self.path, ObjectPath):
                data = self.path.read_bytes(start, start + len(buffer))
                if len(data) != len(buffer):
                    raise CorruptFileError(self.path, "it was cut off or replaced")
                buffer[:] = data
                return
            while buffer:
                count = os.preadv(self.descriptor, [buffer], start)
                if count == 0:
                    raise CorruptFileError(self.path, "it was cut off while it was read")
                start, buffer = start + count, buffer[count:]


@contextmanager
def open_to_read(path: AnyPath, size: int) -> Iterator[OpenFile]:
    """Yield an open file, after checking that it has `size` bytes. The size of an object is not checked.

    Raises CorruptFileError if the size differs or the file is damaged, and CheckpointError if it cannot be opened for
    another reason.
    """
    if isinstance(path, ObjectPath):
        yield OpenFile(path, -1)
        return
    with _reported(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # never blocks on a pipe, whose size then differs
    try:
        check_size(path, os.fstat(descriptor).st_size, size)
        yield OpenFile(path, descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _reported(path: AnyPath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


def read_block(file: OpenFile, block: Block, buffer: memoryview) -> None:
    """Read a block into a buffer of the same size. Raises CorruptFileError if its checksum does not match."""
    if checksum_of(file, block.start, buffer, block.before) != block.checksum:
        where = f"bytes {block.start} to {block.stop} of the file"
        raise CorruptFileError(
            file.path, f"the checksum of {block.saved.entry} does not match, in {where}", block.saved.name
        )


def checksum_of(file: OpenFile, start: int, buffer: memoryview, before: int = 0) -> int:
    """Fill a buffer with the bytes from position `start` on, and return the running CRC-32 that includes them.

    `before` is the CRC-32 of the bytes before them.
    """
    for first in range(0, len(buffer), file.piece):
        piece = buffer[first : first + file.piece]
        file.read(start + first, piece)
        before = zlib.crc32(piece, before)
    return before

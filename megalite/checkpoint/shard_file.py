"""Files of boxes, written as a stream with checksums, and read in blocks that are compared with their checksums."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

import torch
from torch import Tensor

from megalite.checkpoint import manifest
from megalite.checkpoint.corruption import CorruptFileError, check_size, unreadable
from megalite.checkpoint.file_layout import ByteRange
from megalite.checkpoint.manifest import Block, SavedFile
from megalite.checkpoint.storage import AnyPath, ObjectPath, Writer
from megalite.errors import CheckpointError

_ALONE = 1 << 16  # bytes whose checksum takes less than handing them to another thread


@dataclass(frozen=True)
class Written:
    """Result of writing a file."""

    file: SavedFile
    checksums: list[tuple[int, ...]]
    """Checksums of the blocks of each box, as in `SavedBox`."""


def write(stream: Writer, boxes: Iterable[tuple[ByteRange, Tensor]], closed: Event | None = None) -> Written:
    """Write boxes in the order of their byte ranges; a second thread computes their checksums meanwhile.

    A tensor on a device is copied to the host one block at a time. Raises OSError if the disk fails, and
    CheckpointError once `closed` is set.
    """
    size, around = 0, 0
    checksums: list[tuple[int, ...]] = []
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as thread:
        for byte_range, values in boxes:
            around = zlib.crc32(byte_range.before, around)
            stream.write(byte_range.before)
            sums = _RunningChecksum(thread)
            for data in _blocks_of(values):
                if closed is not None and closed.is_set():
                    raise CheckpointError("the run ended before the checkpoint was written")
                sums.add(data)
                stream.write(data)
            checksums.append(sums.result())
            after = byte_range.after(checksums[-1][-1])
            around = zlib.crc32(after, around)
            stream.write(after)
            size = byte_range.stop + len(after)
    return Written(SavedFile(size, around), checksums)


def write_bytes(stream: Writer, data: bytes) -> SavedFile:
    """Write a file without boxes."""
    stream.write(data)
    return SavedFile(len(data), zlib.crc32(data))


class _RunningChecksum:
    """CRC-32 of all bytes so far, kept after each block; at most one block waits to be added."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._sums: list[int] = []
        self._last: Future[None] | None = None

    def add(self, data: memoryview) -> None:
        if self._last is None and len(data) <= _ALONE:
            self._take(data)
        else:
            if self._last is not None:
                self._last.result()
            self._last = self._thread.submit(self._take, data)

    def _take(self, data: memoryview) -> None:
        self._sums.append(zlib.crc32(data, self._sums[-1] if self._sums else 0))

    def result(self) -> tuple[int, ...]:
        if self._last is not None:
            self._last.result()
        return tuple(self._sums)


def _blocks_of(values: Tensor) -> Iterator[memoryview]:
    flat = values.detach().flatten().contiguous()
    flat = flat.as_strided(flat.shape, (1,))  # also where the one element of a tensor has another stride
    step = manifest.BLOCK // flat.itemsize
    for start in range(0, flat.numel(), step):
        yield bytes_of(flat[start : start + step].cpu())


def bytes_of(values: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return values.view(-1).view(torch.uint8).numpy().data


# ------------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class OpenFile:
    """File or object of a checkpoint, open for reading by any thread."""

    path: AnyPath
    descriptor: int
    """File descriptor; not used for an object."""

    @property
    def piece(self) -> int:
        """Number of bytes to read at a time: of a file, few enough that they are still in the processor's cache when
        their checksum is computed; of an object, a block per request."""
        return manifest.BLOCK if isinstance(self.path, ObjectPath) else 1 << 18

    def read(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes that begin at a position. Raises CorruptFileError or CheckpointError."""
        with _reported(self.path):
            if isinstance(self.path, ObjectPath):
                data = self.path.read_range(start, start + len(buffer))
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
    """Yield an open file, which should have `size` bytes.

    Raises CorruptFileError if its size differs or it cannot be read any more, and CheckpointError if access to it is
    refused.
    """
    if isinstance(path, ObjectPath):
        yield OpenFile(path, -1)
        return
    with _reported(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait on a pipe: its size differs
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
    """Fill a buffer, of the block's size, with a block. Raises CorruptFileError if its checksum is wrong."""
    if checksum_of(file, block.start, buffer, block.before) != block.checksum:
        where = f"bytes {block.start} to {block.stop} of the file"
        raise CorruptFileError(
            file.path, f"the checksum of {block.saved.entry} does not match, in {where}", block.saved.tensor
        )


def checksum_of(file: OpenFile, start: int, buffer: memoryview, before: int = 0) -> int:
    """Fill a buffer from a position of a file, and return the CRC-32 of all bytes so far; `before` is that of those
    before."""
    for first in range(0, len(buffer), file.piece):
        piece = buffer[first : first + file.piece]
        file.read(start + first, piece)
        before = zlib.crc32(piece, before)
    return before

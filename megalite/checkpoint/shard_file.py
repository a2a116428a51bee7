"""Files of boxes. They are written as a stream with checksums, and read in blocks that are verified."""

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

_ALONE = 1 << 16  # up to this many bytes, computing the checksum takes less time than using another thread


@dataclass(frozen=True)
class Written:
    """Result of writing a file."""

    file: SavedFile
    checksums: list[tuple[int, ...]]
    """Checksums of the blocks of each box, as in `SavedBox`."""


def write(stream: Writer, boxes: Iterable[tuple[ByteRange, Tensor]], closed: Event | None = None) -> Written:
    """Write boxes in the order of their byte ranges, while a second thread computes the checksums.

    A tensor on a device is copied to the host block by block. Raises OSError if the disk fails, and CheckpointError
    after `closed` is set.
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
    """Write a file that contains no boxes."""
    stream.write(data)
    return SavedFile(len(data), zlib.crc32(data))


class _RunningChecksum:
    """Running CRC-32 of a box, recorded after each block. At most one block is in the queue of the other thread."""

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
            file.path, f"the checksum of {block.saved.entry} does not match, in {where}", block.saved.tensor
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

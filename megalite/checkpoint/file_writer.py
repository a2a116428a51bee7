"""Writer of files of boxes, from any source, in one process and in bounded memory."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megalite.checkpoint import manifest
from megalite.checkpoint.file_layout import ByteRange, TensorBox
from megalite.checkpoint.formats import Format
from megalite.checkpoint.manifest import SavedBox, SavedFile, SavedTensor
from megalite.checkpoint.reader import chunks
from megalite.checkpoint.shard_file import bytes_of
from megalite.checkpoint.source import Source, numbers_as_numbers
from megalite.parallel.sharding import Box
from megalite.process.progress import Advance, in_threads

Cut = Sequence[Sequence[tuple[str, Box]]]
"""Boxes of each file, in order, each with the name of its tensor."""


class FileWriter:
    """Set of files whose sizes are known in advance. Tensors are copied into them in any order."""

    def __init__(self, source: Source, folder: Path, cut: Cut, file_format: Format, advance: Advance) -> None:
        self.source, self.folder, self.format, self.advance = source, folder, file_format, advance
        self.placed: dict[str, list[tuple[TensorBox, ByteRange]]] = {}
        """Parts of each file, with their byte ranges."""
        self.by_tensor: dict[str, list[tuple[str, TensorBox, ByteRange]]] = {}
        """Files, parts and byte ranges of each tensor."""
        for boxes in cut:
            kinds = source.tensors
            parts = [TensorBox(name, kinds[name].shape, kinds[name].dtype, box) for name, box in boxes]
            if parts:
                self._begin(file_format.file.format(writer=len(self.placed), number=len(self.placed) + 1), parts)

    def _begin(self, file: str, parts: Sequence[TensorBox]) -> None:
        self.placed[file] = list(zip(parts, self.format.byte_ranges(parts), strict=True))
        with (self.folder / file).open("xb") as stream:
            for part, byte_range in self.placed[file]:
                self.by_tensor.setdefault(part.name, []).append((file, part, byte_range))
                stream.seek(byte_range.start - len(byte_range.before))
                stream.write(byte_range.before)

    def write(self, workers: int) -> dict[str, SavedTensor]:
        """Write all files with this many threads, and sync them to disk.

        Raises OSError, or CheckpointError if the source cannot be read.
        """
        names = sorted(self.by_tensor, key=numbers_as_numbers)
        tensors = dict(zip(names, in_threads(workers, self._copy, names), strict=True))
        in_threads(workers, self._sync, self.placed)
        return tensors

    def _copy(self, name: str) -> SavedTensor:
        """Write all boxes of a tensor."""
        kind = self.source.tensors[name]
        boxes = tuple(self._copy_box(*each) for each in self.by_tensor[name])
        return SavedTensor(kind.shape, kind.dtype, boxes)

    def _copy_box(self, file: str, part: TensorBox, byte_range: ByteRange) -> SavedBox:
        checksums: list[int] = []
        checksum = 0
        buffer = torch.empty(manifest.BLOCK // part.dtype.itemsize, dtype=part.dtype)
        with (self.folder / file).open("r+b") as stream:
            stream.seek(byte_range.start)
            for block in chunks(part.box, part.dtype):
                for box, _ in block:
                    values = buffer[: box.numel].view(box.size)
                    self.source.fill(part.name, box, values)
                    data = bytes_of(values)
                    checksum = zlib.crc32(data, checksum) if self.format.checksums else 0
                    stream.write(data)
                    self.advance(len(data))
                checksums.append(checksum)
            stream.write(byte_range.after(checksum))
        return SavedBox(part.name, part.dtype, part.box, file, byte_range.start, tuple(checksums))

    def _sync(self, file: str) -> None:
        with (self.folder / file).open("r+b") as stream:
            os.fsync(stream.fileno())

    def saved_files(self, tensors: Mapping[str, SavedTensor]) -> dict[str, SavedFile]:
        """Return the records of the files. Call it after `write`, with its result."""
        checksums = {(box.file, box.start): box.checksums[-1] for tensor in tensors.values() for box in tensor.boxes}
        files: dict[str, SavedFile] = {}
        for file, placed in self.placed.items():
            around = 0
            for _, byte_range in placed:
                after = byte_range.after(checksums[file, byte_range.start])
                around = zlib.crc32(after, zlib.crc32(byte_range.before, around))
            files[file] = SavedFile(byte_range.stop + len(after), around)
        return files

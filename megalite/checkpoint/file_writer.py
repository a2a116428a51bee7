"""Writing of files of boxes, from any source, in one process and in bounded memory."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megalite.atomic_files import open_itself
from megalite.checkpoint import manifest
from megalite.checkpoint.formats import Format
from megalite.checkpoint.manifest import SavedFile, SavedTensor
from megalite.checkpoint.reader import chunks
from megalite.checkpoint.shard_file import Checksums, bytes_of, records, write_index
from megalite.checkpoint.tensors import ByteRange, Kind, Source, TensorBox, numbers_as_numbers
from megalite.parallel.sharding import Box
from megalite.process.progress import Advance, in_threads

Cut = Sequence[Sequence[tuple[str, Box]]]
"""Boxes of each file, in order, each with the name of its tensor."""


def write_files(
    source: Source, folder: Path, cut: Cut, file_format: Format, workers: int, advance: Advance
) -> tuple[dict[str, SavedFile], dict[str, SavedTensor]]:
    """Write files and their index into a folder, sync them to disk, and return the records of files and tensors.

    The sizes of the files are known in advance, so that `workers` threads copy the tensors in any order. Raises
    OSError, or CheckpointError if the source cannot be read.
    """
    placed = create_files(source.tensors, folder, cut, file_format)
    by_tensor: dict[str, list[tuple[str, TensorBox, ByteRange]]] = {}
    for file, parts in placed.items():
        for part, byte_range in parts:
            by_tensor.setdefault(part.name, []).append((file, part, byte_range))
    checksums: dict[tuple[str, int], Checksums] = {}

    def copy(name: str) -> None:
        for file, part, byte_range in by_tensor[name]:
            sums = _copy_box(source, folder / file, part, byte_range, file_format.checksums, advance)
            checksums[file, byte_range.start] = sums

    names = sorted(by_tensor, key=numbers_as_numbers)
    in_threads(workers, copy, names)
    in_threads(workers, _sync, [folder / file for file in placed])
    files, tensors = records(placed, checksums)
    return files | write_index(folder, file_format, placed), {name: tensors[name] for name in names}


def create_files(
    kinds: Mapping[str, Kind], folder: Path, cut: Cut, file_format: Format
) -> dict[str, list[tuple[TensorBox, ByteRange]]]:
    """Create files with all that comes before their boxes, and return the place of each box, by file."""
    placed: dict[str, list[tuple[TensorBox, ByteRange]]] = {}
    for boxes in filter(None, cut):
        parts = [
            TensorBox(name, kinds[name].shape, kinds[name].dtype, box, relayout=kinds[name].relayout)
            for name, box in boxes
        ]
        file = file_format.file.format(writer=len(placed), number=len(placed) + 1)
        placed[file] = list(zip(parts, file_format.byte_ranges(parts), strict=True))
        with (folder / file).open("xb") as stream:
            for _, byte_range in placed[file]:
                stream.seek(byte_range.start - len(byte_range.before))
                stream.write(byte_range.before)
    return placed


def _copy_box(
    source: Source, file: Path, part: TensorBox, byte_range: ByteRange, checked: bool, advance: Advance
) -> Checksums:
    """Copy a box into its file, and return its checksums; zeros unless `checked`."""
    checksums: list[int] = []
    checksum = 0
    buffer = torch.empty(manifest.BLOCK // part.dtype.itemsize, dtype=part.dtype)
    with open_itself(file, "r+b") as stream:
        stream.seek(byte_range.start)
        for block in chunks(part.box, part.dtype):
            for box, _ in block:
                values = buffer[: box.numel].view(box.size)
                source.fill(part.name, box, values)
                data = bytes_of(values)
                checksum = zlib.crc32(data, checksum) if checked else 0
                stream.write(data)
                advance(len(data))
            checksums.append(checksum)
        stream.write(byte_range.after(checksum))
    return tuple(checksums)


def _sync(file: Path) -> None:
    with open_itself(file, "r+b") as stream:
        os.fsync(stream.fileno())

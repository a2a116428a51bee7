"""Write files of boxes, and whole checkpoints, from any source, in one process and in bounded memory."""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megalite.atomic_files import open_itself, writing
from megalite.checkpoint import manifest, saving
from megalite.checkpoint.formats import NATIVE, Format
from megalite.checkpoint.integrity import covers
from megalite.checkpoint.manifest import (
    RANK,
    Manifest,
    SavedFile,
    SavedTensor,
    TrainingState,
    owner_name,
    split_name,
)
from megalite.checkpoint.reader import chunks
from megalite.checkpoint.shard_file import Checksums, bytes_of, records, write_index
from megalite.checkpoint.tensors import ByteRange, Kind, Source, TensorBox, natural_order
from megalite.checkpoint.transaction import FolderTransaction
from megalite.errors import CheckpointError
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

    names = sorted(by_tensor, key=natural_order)
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


# ------------------------------------------------------------------------------------------------ checkpoints


def cut_evenly(tensors: Mapping[str, Kind], files: int) -> Cut:
    """Divide the tensors into files of equal size.

    The tensors are sorted by layer, and a weight is next to its state, so that a pipeline stage reads few files.
    """
    total = sum(kind.size for kind in tensors.values())
    bounds = [total * file // files for file in range(files + 1)]
    cut: list[list[tuple[str, Box]]] = [[] for _ in range(files)]
    position = 0
    for name in sorted(tensors, key=lambda name: (natural_order(split_name(name)[1]), name)):
        kind = tensors[name]
        box, item, size = Box.whole(kind.shape), kind.dtype.itemsize, kind.size
        for file in range(bisect_right(bounds, position) - 1, bisect_right(bounds, position + size - 1)):
            first, stop = (min(max(-(-(bound - position) // item), 0), box.numel) for bound in bounds[file : file + 2])
            cut[file] += [(name, part) for part, _ in box.flat_range(first, stop)]
        position += size
    return cut


def cut_by_weights(tensors: Mapping[str, Kind], weights: Iterable[Iterable[tuple[str, Box]]]) -> Cut:
    """Divide the optimizer's state like the weights.

    `weights` has the boxes of weights and modules' state, per file. State that has another shape than its weight is not
    divided: it goes into the first file that has a part of the weight. So do tensors with replicas. Private state of
    ranks goes into the first file. Raises CheckpointError if `weights` does not match the tensors of the checkpoint.
    """
    weights = [list(file) for file in weights]
    private = [(name, kind.whole) for name, kind in tensors.items() if name.startswith(RANK)]
    alike: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    for name, kind in tensors.items():
        owner = owner_name(name)
        same = kind.relayout is None and kind.shape == tensors.get(owner, kind).shape
        (alike if same else others).setdefault(owner, []).append(name)
    cut: list[list[tuple[str, Box]]] = []
    for file in weights:
        placed: list[tuple[str, Box]] = []
        for owner, box in file:
            placed += [(name, box) for name in alike.get(owner, ())]
            placed += [(name, Box.whole(tensors[name].shape)) for name in others.pop(owner, ())]
        cut.append(placed + private)
        private = []
    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    for name, box in (placed for file in cut for placed in file):
        boxes[name].append(box)
    for name, tensor in tensors.items():
        if not covers(boxes[name], Box.whole(tensor.shape)):
            raise CheckpointError(f"{name} {list(tensor.shape)} is not in the model that its config describes")
    return cut


def write_checkpoint(
    source: Source,
    training: TrainingState,
    config: dict[str, Any],
    directory: Path,
    cut: Cut,
    workers: int,
    advance: Advance,
    file_format: Format = NATIVE,
) -> Path:
    """Write the tensors in `cut` as a checkpoint into run directory `directory`, and return the new folder.

    Raises CheckpointError if the source is damaged, the disk fails, or there is already a checkpoint of this iteration.
    The incomplete files are then removed.
    """
    transaction = FolderTransaction(directory, training.iteration)
    if transaction.path.exists():
        raise CheckpointError(f"{transaction.path} already exists: choose another folder")
    try:
        with writing(transaction.folder):
            transaction.begin()
            files, tensors = write_files(source, transaction.folder, cut, file_format, workers, advance)
            saving.finish(transaction, Manifest(training, config, files, tensors))
    finally:
        transaction.abandon()
    return transaction.path

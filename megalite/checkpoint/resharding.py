"""Rewriting a checkpoint with other cuts, in one process and in bounded memory: the values stay, bit for bit."""

from __future__ import annotations

import os
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from megalite.checkpoint import manifest, saving, tensor_file
from megalite.checkpoint.attempt import FolderAttempt
from megalite.checkpoint.manifest import Manifest, SavedBox, SavedTensor, covers, logical_name
from megalite.checkpoint.progress import Advance, in_threads
from megalite.checkpoint.reader import CheckpointReader, chunks, dtype_of, size_in_bytes, whole
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box

Cut = Sequence[Sequence[tuple[str, Box]]]
"""By file: the boxes that it is to hold, by tensor, in their order."""


def cut_evenly(tensors: Mapping[str, SavedTensor], files: int) -> Cut:
    """As many bytes for each file. A weight and its state are neighbours, and so are layers: stages read few files."""
    total = sum(map(size_in_bytes, tensors.values()))
    bounds = [total * file // files for file in range(files + 1)]
    cut: list[list[tuple[str, Box]]] = [[] for _ in range(files)]
    position = 0
    for name in sorted(tensors, key=_by_weight):
        box, item, size = whole(tensors[name]), dtype_of(tensors[name]).itemsize, size_in_bytes(tensors[name])
        for file in range(bisect_right(bounds, position) - 1, bisect_right(bounds, position + size - 1)):
            first, stop = (min(max(-(-(bound - position) // item), 0), box.numel) for bound in bounds[file : file + 2])
            cut[file] += [(name, part) for part, _ in box.flat_range(first, stop)]
        position += size
    return cut


def _by_weight(name: str) -> tuple[list[str | int], str]:
    parts = re.split(r"(\d+)", logical_name(name))
    return [int(part) if part.isdecimal() else part for part in parts], name


def cut_by_weights(tensors: Mapping[str, SavedTensor], weights: Iterable[Iterable[tuple[str, Box]]]) -> Cut:
    """The optimizer's state cut as the weights, whose boxes by file are given.

    Raises CheckpointError where these are not the checkpoint's weights.
    """
    by_weight: dict[str, list[str]] = {}
    for name in tensors:
        by_weight.setdefault(logical_name(name), []).append(name)
    cut = [[(name, box) for weight, box in file for name in by_weight[logical_name(weight)]] for file in weights]
    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    for name, box in (placed for file in cut for placed in file):
        boxes[name].append(box)
    for name, tensor in tensors.items():
        if not covers(boxes[name], whole(tensor)):
            raise CheckpointError(f"{name} {list(tensor.shape)} is not of the model that the config in it describes")
    return cut


def reshard(reader: CheckpointReader, directory: Path, cut: Cut, workers: int, advance: Advance) -> Path:
    """Write the tensors that `cut` names into run directory `directory`, as a save does, and return the new folder.

    Raises CheckpointError, and leaves nothing behind: what was read is damaged, the disk fails, or there is a
    checkpoint of this iteration already.
    """
    training = reader.manifest.training
    attempt = FolderAttempt(directory, training.iteration)
    if attempt.path.exists():
        raise CheckpointError(f"{attempt.path} is there already: choose another folder")
    try:
        attempt.begin()
        writer = _Writer(reader, attempt.folder, cut, advance)
        tensors = in_threads(workers, writer.copy, sorted(writer.places))
        in_threads(workers, writer.sync, writer.files)
        made = {tensor.boxes[0].tensor: tensor for tensor in tensors}
        saving.finish(attempt, Manifest(training, reader.manifest.config, writer.files, made))
    except OSError as error:
        raise CheckpointError(
            f"writing {attempt.folder} failed: {error}. Free space, or choose another folder"
        ) from error
    finally:
        attempt.abandon()
    return attempt.path


class _Writer:
    """Files of known size, into which tensors are copied in any order."""

    def __init__(self, reader: CheckpointReader, folder: Path, cut: Cut, advance: Advance) -> None:
        self.reader, self.folder, self.advance = reader, folder, advance
        self.files: dict[str, int] = {}
        self.places: dict[str, list[tuple[str, Box, int]]] = {}
        """By tensor: its boxes, each with its file and where in it."""
        for number, boxes in enumerate(cut):
            self._begin(f"rank_{number:05d}.safetensors", boxes)

    def _begin(self, file: str, boxes: Iterable[tuple[str, Box]]) -> None:
        tensors = self.reader.manifest.tensors
        named = {manifest.entry(name, box): (name, box) for name, box in boxes}
        beginning, entries = tensor_file.header(
            (entry, dtype_of(tensors[name]), box.size) for entry, (name, box) in named.items()
        )
        for entry, (name, box) in named.items():
            self.places.setdefault(name, []).append((file, box, entries[entry].start))
        self.files[file] = max((entry.stop for entry in entries.values()), default=len(beginning))
        with (self.folder / file).open("xb") as stream:
            stream.write(beginning)
            stream.truncate(self.files[file])

    def copy(self, name: str) -> SavedTensor:
        """Write all boxes of a tensor."""
        tensor = self.reader.manifest.tensors[name]
        boxes = [
            SavedBox(name, box, file, self._copy_box(name, file, box, start)) for file, box, start in self.places[name]
        ]
        return SavedTensor(tensor.shape, tensor.dtype, tuple(boxes))

    def _copy_box(self, name: str, file: str, box: Box, start: int) -> int:
        """Write a box and return its checksum."""
        checksum = 0
        with (self.folder / file).open("r+b") as stream:
            stream.seek(start)
            for part, _ in chunks(box, dtype_of(self.reader.manifest.tensors[name])):
                data = self.reader.read(name, part).flatten().view(torch.uint8).numpy().data
                checksum = zlib.crc32(data, checksum)
                stream.write(data)
                self.advance(len(data))
        return checksum

    def sync(self, file: str) -> None:
        with (self.folder / file).open("r+b") as stream:
            os.fsync(stream.fileno())

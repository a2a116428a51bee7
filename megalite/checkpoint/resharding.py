"""Rewriting a checkpoint with other cuts, in one process and in bounded memory: the values stay, bit for bit."""

from __future__ import annotations

import os
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint import saving
from megalite.checkpoint.attempt import FolderAttempt
from megalite.checkpoint.box_file import bytes_of
from megalite.checkpoint.container import Part, Place
from megalite.checkpoint.formats import NATIVE, Format, Placed
from megalite.checkpoint.manifest import Manifest, SavedBox, SavedFile, SavedTensor, covers, logical_name
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


def reshard(
    reader: CheckpointReader,
    directory: Path,
    cut: Cut,
    workers: int,
    advance: Advance,
    file_format: Format = NATIVE,
) -> Path:
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
        writer = _Writer(reader, attempt.folder, cut, file_format, advance)
        names = sorted(writer.by_tensor)
        tensors = dict(zip(names, in_threads(workers, writer.copy, names), strict=True))
        in_threads(workers, writer.sync, writer.outputs)
        files = writer.saved_files(tensors) | saving.write_index(attempt, file_format, writer.placed())
        saving.finish(attempt, Manifest(training, reader.manifest.config, files, tensors))
    except OSError as error:
        raise CheckpointError(
            f"writing {attempt.folder} failed: {error}. Free space, or choose another folder"
        ) from error
    finally:
        attempt.abandon()
    return attempt.path


@dataclass(frozen=True)
class _Output:
    """A box to write."""

    part: Part
    file: str
    place: Place


class _Writer:
    """Files of known size, into which tensors are copied in any order."""

    def __init__(self, reader: CheckpointReader, folder: Path, cut: Cut, file_format: Format, advance: Advance) -> None:
        self.reader, self.folder, self.format, self.advance = reader, folder, file_format, advance
        tensors = reader.manifest.tensors
        self.outputs: dict[str, list[_Output]] = {}
        """By file."""
        for boxes in cut:
            parts = [Part(name, tensors[name].shape, dtype_of(tensors[name]), box) for name, box in boxes]
            if parts:
                self._begin(file_format.file.format(writer=len(self.outputs)), parts)
        self.by_tensor: dict[str, list[_Output]] = {}
        for output in (output for outputs in self.outputs.values() for output in outputs):
            self.by_tensor.setdefault(output.part.name, []).append(output)

    def _begin(self, file: str, parts: Sequence[Part]) -> None:
        self.outputs[file] = [
            _Output(part, file, place) for part, place in zip(parts, self.format.places(parts), strict=True)
        ]
        with (self.folder / file).open("xb") as stream:
            for output in self.outputs[file]:
                stream.seek(output.place.start - len(output.place.before))
                stream.write(output.place.before)

    def copy(self, name: str) -> SavedTensor:
        """Write all boxes of a tensor."""
        tensor = self.reader.manifest.tensors[name]
        return SavedTensor(tensor.shape, tensor.dtype, tuple(self._copy_box(each) for each in self.by_tensor[name]))

    def _copy_box(self, output: _Output) -> SavedBox:
        part, place = output.part, output.place
        checksums: list[int] = []
        checksum = 0
        with (self.folder / output.file).open("r+b") as stream:
            stream.seek(place.start)
            for block in chunks(part.box, part.dtype):
                for box, _ in block:
                    data = bytes_of(self.reader.read(part.name, box))
                    checksum = zlib.crc32(data, checksum)
                    stream.write(data)
                    self.advance(len(data))
                checksums.append(checksum)
            stream.write(place.after(checksum))
        return SavedBox(part.name, part.dtype, part.box, output.file, place.start, tuple(checksums))

    def sync(self, file: str) -> None:
        with (self.folder / file).open("r+b") as stream:
            os.fsync(stream.fileno())

    def placed(self) -> Placed:
        """What is in the files."""
        return {file: [(each.part, each.place) for each in outputs] for file, outputs in self.outputs.items()}

    def saved_files(self, tensors: Mapping[str, SavedTensor]) -> dict[str, SavedFile]:
        """The files, once the tensors are in them."""
        checksums = {(box.file, box.start): box.checksums[-1] for tensor in tensors.values() for box in tensor.boxes}
        files: dict[str, SavedFile] = {}
        for file, outputs in self.outputs.items():
            around = 0
            for place in (output.place for output in outputs):
                after = place.after(checksums[file, place.start])
                around = zlib.crc32(after, zlib.crc32(place.before, around))
            files[file] = SavedFile(place.stop + len(after), around)
        return files

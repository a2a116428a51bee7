"""Rewrite a checkpoint with other boxes, in one process and in bounded memory. The values stay bit-identical."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megalite.atomic_files import writing
from megalite.checkpoint import saving
from megalite.checkpoint.file_writer import Cut, write_files
from megalite.checkpoint.formats import NATIVE, Format
from megalite.checkpoint.integrity import covers
from megalite.checkpoint.manifest import RANK, Manifest, TrainingState, owner_name, split_name
from megalite.checkpoint.tensors import Kind, Source, numbers_as_numbers
from megalite.checkpoint.transaction import FolderTransaction
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box
from megalite.process.progress import Advance


def cut_evenly(tensors: Mapping[str, Kind], files: int) -> Cut:
    """Divide the tensors into files of equal size.

    The tensors are sorted by layer, and a weight is next to its state, so that a pipeline stage reads few files.
    """
    total = sum(kind.size for kind in tensors.values())
    bounds = [total * file // files for file in range(files + 1)]
    cut: list[list[tuple[str, Box]]] = [[] for _ in range(files)]
    position = 0
    for name in sorted(tensors, key=lambda name: (numbers_as_numbers(split_name(name)[1]), name)):
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

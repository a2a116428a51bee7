"""Inspection of a checkpoint: its contents, its damage, and statistics of its values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import manifest
from megalite.checkpoint.integrity import CorruptFileError
from megalite.checkpoint.manifest import Manifest, SavedBox, SavedTensor, split_name
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.selection import check_sizes
from megalite.errors import CheckpointError
from megalite.process.progress import Advance, in_threads
from megalite.storage import AnyPath


def describe(reader: CheckpointReader, names: Iterable[str]) -> dict[str, Any]:
    """Return the contents of a checkpoint, including the named tensors, as JSON values."""
    saved = reader.manifest
    files = _boxes_by_file(saved).items()
    return {
        "checkpoint": str(reader.path),
        "training": saved.training.to_json(),
        "config": saved.config,
        "files": {
            file: {"bytes": saved.files[file].size, "boxes": len(boxes), "tensors": len({box.name for box in boxes})}
            for file, boxes in files
        },
        "totals": _totals(saved.tensors),
        "tensors": {name: _tensor(saved.tensors[name]) for name in names},
    }


def _tensor(tensor: SavedTensor) -> dict[str, Any]:
    fields = manifest.tensor_to_json(tensor)
    boxes = fields.pop("boxes")
    return {**fields, "bytes": tensor.size, "boxes": boxes}


def _totals(tensors: dict[str, SavedTensor]) -> dict[str, dict[str, int]]:
    """Return totals per kind. The kinds are the weights, the modules' state, and each state of the optimizer."""
    totals: dict[str, dict[str, int]] = {}
    for name, tensor in tensors.items():
        kind = totals.setdefault(split_name(name)[0], {"tensors": 0, "elements": 0, "bytes": 0})
        kind["tensors"] += 1
        kind["elements"] += tensor.whole.numel
        kind["bytes"] += tensor.size
    return totals


def _boxes_by_file(saved: Manifest) -> dict[str, list[SavedBox]]:
    boxes: dict[str, list[SavedBox]] = {file: [] for file in saved.files}
    for tensor in saved.tensors.values():
        for box in tensor.boxes:
            boxes[box.file].append(box)
    return boxes


# ------------------------------------------------------------------------------------------------------ damage


def verify(reader: CheckpointReader, workers: int, advance: Advance) -> list[CorruptFileError]:
    """Return all damage in a checkpoint. Every file is read completely, even if others are damaged."""
    files = _boxes_by_file(reader.manifest).items()
    found = in_threads(workers, lambda file: list(_damages_of_file(reader, *file, advance)), files)
    return [*_uncovered(reader), *(damage for damages in found for damage in damages), *_foreign(reader)]


def _damages_of_file(
    reader: CheckpointReader, file: str, boxes: list[SavedBox], advance: Advance
) -> Iterator[CorruptFileError]:
    """Yield the damage of a file: to its size, to the bytes around its boxes, and to each box."""
    path = reader.path / file
    try:
        check_sizes(reader.path, reader.manifest, [file])
    except CheckpointError as error:
        yield _damage(path, error)
        return
    try:
        reader.check_around(file, boxes)
    except CheckpointError as error:
        yield _damage(path, error)
    for saved in boxes:
        try:
            for block in reader.blocks(saved):
                advance(block.nbytes)
        except CheckpointError as error:
            yield _damage(path, error, saved.name)


def _damage(path: AnyPath, error: CheckpointError, tensor: str | None = None) -> CorruptFileError:
    return CorruptFileError(path, error.problem if isinstance(error, CorruptFileError) else str(error), tensor)


def _uncovered(reader: CheckpointReader) -> Iterator[CorruptFileError]:
    for name in reader.tensors:
        try:
            reader.check_covered(name)
        except CorruptFileError as damage:
            yield damage


def _foreign(reader: CheckpointReader) -> Iterator[CorruptFileError]:
    paths: list[AnyPath] = [*reader.path.iterdir()]
    for path in sorted(paths, key=lambda path: path.name):
        if path.name != manifest.NAME and path.name not in reader.manifest.files:
            yield CorruptFileError(path, "it is not of this checkpoint")


# ------------------------------------------------------------------------------------------------------ values


@dataclass(frozen=True)
class Statistics:
    """Statistics of a tensor's elements. Minimum, maximum, mean, std and norm are computed from the finite elements."""

    elements: int
    finite: int
    minimum: float
    maximum: float
    mean: float
    squares: float
    """Sum of the squared deviations from the mean."""
    zeros: int
    denormals: int
    nans: int

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        return math.hypot(math.sqrt(self.squares), math.sqrt(self.finite) * self.mean)

    @property
    def infinities(self) -> int:
        return self.elements - self.finite - self.nans

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as JSON values. If no element is finite, the undefined ones are None."""
        numbers = {name: getattr(self, name) for name in ("minimum", "maximum", "mean", "std", "norm")}
        counts = {name: getattr(self, name) for name in ("elements", "zeros", "denormals", "nans", "infinities")}
        return {name: value if self.finite else None for name, value in numbers.items()} | counts


def statistics(reader: CheckpointReader, name: str, advance: Advance) -> Statistics:
    """Return the statistics of a tensor, computed in one pass. Raises CorruptFileError."""

    def parts() -> Iterator[Statistics]:
        for saved in reader.manifest.tensors[name].boxes:
            for block in reader.blocks(saved):
                yield _statistics_of(block)
                advance(block.nbytes)

    return reduce(_joined, parts())


def _statistics_of(values: Tensor) -> Statistics:
    """Return the statistics of a part that fits in memory, computed in fp64 from its finite values."""
    finite = values.double()
    if not finite.sum().isfinite():
        finite = finite[finite.isfinite()]
    count = finite.numel()
    low, high = finite.aminmax() if count else (math.inf, -math.inf)
    mean = float(finite.mean()) if count else 0.0
    squares = float(finite.sub_(mean).square_().sum())
    zeros = values.numel() - int(values.count_nonzero())
    tiny = torch.finfo(values.dtype).tiny if values.is_floating_point() else 1
    return Statistics(
        elements=values.numel(),
        finite=count,
        minimum=float(low),
        maximum=float(high),
        mean=mean,
        squares=squares,
        zeros=zeros,
        denormals=int((values.abs() < tiny).count_nonzero()) - zeros,
        nans=int(values.isnan().count_nonzero()) if count < values.numel() else 0,
    )


def _joined(a: Statistics, b: Statistics) -> Statistics:
    """Combine statistics of two parts, after Chan, Golub and LeVeque, "Updating formulae" (1979)."""
    count = max(a.finite + b.finite, 1)
    step = b.mean - a.mean
    return Statistics(
        elements=a.elements + b.elements,
        finite=a.finite + b.finite,
        minimum=min(a.minimum, b.minimum),
        maximum=max(a.maximum, b.maximum),
        mean=a.mean + step * b.finite / count,
        squares=a.squares + b.squares + step * step * a.finite * b.finite / count,
        zeros=a.zeros + b.zeros,
        denormals=a.denormals + b.denormals,
        nans=a.nans + b.nans,
    )

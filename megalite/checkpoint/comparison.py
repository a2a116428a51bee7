"""Comparison of two checkpoints. They may have been saved under different layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.manifest import SavedTensor, dtype_name
from megalite.checkpoint.reader import CheckpointReader, chunks
from megalite.process.progress import Advance, in_threads

ABSENT = "(absent)"


@dataclass(frozen=True)
class ValueDifference:
    """Difference between the values of a tensor. It is infinite if only one of two elements is finite."""

    elements: int
    different: int
    """Number of elements that differ: in their bits or, if the dtypes differ, in their values."""
    absolute: float
    """Greatest |a - b|."""
    relative: float
    """Greatest |a - b| / max(|a|, |b|)."""


@dataclass(frozen=True)
class Comparison:
    """Differences between two checkpoints. In each pair, the value of the first checkpoint comes first."""

    training: dict[str, tuple[Any, Any]]
    config: dict[str, tuple[Any, Any]]
    """Configuration values that differ, by section.field."""
    only_in_a: list[str]
    only_in_b: list[str]
    kinds: dict[str, tuple[str, str]]
    """Dtype and shape, as text, of each tensor for which these differ."""
    values: dict[str, ValueDifference]
    """Differences of the tensors whose values differ."""
    compared: int
    """Number of tensors whose values were compared."""

    @property
    def same(self) -> bool:
        differences = (self.training, self.config, self.only_in_a, self.only_in_b, self.kinds, self.values)
        return not any(differences)


def compared_bytes(a: CheckpointReader, b: CheckpointReader, names: Iterable[str]) -> int:
    """Return the total number of bytes that `compare` will report to `advance`."""
    return sum(a.tensors[name].size for name in _comparable(a, b, names))


def compare(
    a: CheckpointReader, b: CheckpointReader, names: Iterable[str], workers: int, advance: Advance
) -> Comparison:
    """Compare training state, configuration and the named tensors.

    Raises CorruptFileError if a checksum does not match; every checksum is verified before its values are compared.
    """
    ours, theirs, names = a.tensors, b.tensors, sorted(names)
    comparable = _comparable(a, b, names)
    found = in_threads(workers, lambda name: compare_values(a, b, name, advance), comparable)
    return Comparison(
        training=_different(asdict(a.manifest.training), asdict(b.manifest.training)),
        config=_different(dict(_flat(a.manifest.config)), dict(_flat(b.manifest.config))),
        only_in_a=[name for name in names if name not in theirs],
        only_in_b=[name for name in names if name not in ours],
        kinds=_different(
            {name: _kind(ours[name]) for name in names if name in ours and name in theirs},
            {name: _kind(theirs[name]) for name in names if name in ours and name in theirs},
        ),
        values={name: values for name, values in zip(comparable, found, strict=True) if values.different},
        compared=len(comparable),
    )


def _comparable(a: CheckpointReader, b: CheckpointReader, names: Iterable[str]) -> list[str]:
    ours, theirs = a.tensors, b.tensors
    return [n for n in names if n in ours and n in theirs and ours[n].shape == theirs[n].shape]


def _kind(tensor: SavedTensor) -> str:
    rule = "" if tensor.relayout is None else f", {tensor.relayout} over replicas"
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}{rule}"


def _different(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (ours.get(name, ABSENT), theirs.get(name, ABSENT)) for name in ours | theirs}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def compare_values(a: CheckpointReader, b: CheckpointReader, name: str, advance: Advance) -> ValueDifference:
    """Compare the values of a tensor that has the same shape in both checkpoints, block by block.

    Raises CorruptFileError.
    """
    tensor, other = a.tensors[name], b.tensors[name]
    different, absolute, relative = 0, 0.0, 0.0
    wider = max(tensor.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    for box in (box for block in chunks(tensor.whole, wider) for box, _ in block):
        mine, yours = a.read(name, box), b.read(name, box)
        at = _unequal(mine, yours)
        if at.any():
            greatest = _differences(mine[at].double(), yours[at].double())
            different += int(at.sum())
            absolute, relative = max(absolute, greatest[0]), max(relative, greatest[1])
        advance(mine.nbytes)
    return ValueDifference(tensor.whole.numel, different, absolute, relative)


def _unequal(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype != b.dtype:
        return (a != b) & ~(a.isnan() & b.isnan())
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return a.view(bits) != b.view(bits)


def _differences(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the greatest absolute and the greatest relative difference."""
    absolute = (a - b).abs()
    relative = torch.where(absolute == 0, 0.0, absolute / torch.maximum(a.abs(), b.abs()))
    return _greatest(absolute), _greatest(relative)


def _greatest(values: Tensor) -> float:
    return float(values.nan_to_num(nan=math.inf, posinf=math.inf).max())

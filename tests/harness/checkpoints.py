"""Checkpoints of given tensors, split into boxes that a test chooses."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from megalite.checkpoint import Manifest, TrainingState, saving, shard_file
from megalite.checkpoint.formats import NATIVE, Format
from megalite.checkpoint.tensors import ByteRange, TensorBox
from megalite.checkpoint.transaction import FolderTransaction
from megalite.optim.replica import Relayout
from megalite.parallel.sharding import Box
from megalite.storage import create

STATE = TrainingState(iteration=7, consumed_samples=28, optimizer_steps=6)

Placed = tuple[str, Box]


def write(
    folder: Path,
    tensors: dict[str, Tensor],
    files: Sequence[Sequence[Placed]] | None = None,
    training: TrainingState = STATE,
    config: dict[str, Any] | None = None,
    file_format: Format = NATIVE,
    relayout: Mapping[str, Relayout] | None = None,
) -> Path:
    """Save tensors into a run directory; `files`: the boxes of each file (None: one file, of unsplit tensors);
    `relayout`: the rules of tensors with replicas."""
    files = files or [[(name, Box((0,) * tensor.ndim, tuple(tensor.shape))) for name, tensor in tensors.items()]]
    attempt = FolderTransaction(folder, training.iteration)
    attempt.begin()
    there: dict[str, list[tuple[TensorBox, ByteRange]]] = {}
    checksums: dict[tuple[str, int], shard_file.Checksums] = {}
    for number, placed in enumerate(files):
        if not placed:
            continue
        parts = [
            TensorBox(name, tuple(tensors[name].shape), tensors[name].dtype, box, relayout=(relayout or {}).get(name))
            for name, box in placed
        ]
        places = file_format.byte_ranges(parts)
        path = attempt.file(file_format.file.format(writer=number))
        with create(path) as stream:
            values = (tensors[part.name][part.box.slices()] for part in parts)
            made = shard_file.write(stream, zip(places, values, strict=True))
        there[path.name] = list(zip(parts, places, strict=True))
        checksums |= {(path.name, place.start): sums for place, sums in zip(places, made, strict=True)}
    written, saved = shard_file.records(there, checksums)
    saving.finish(attempt, Manifest(training, config or {"model": {"hidden_size": 8}}, written, saved))
    return attempt.path


def read(path: Path, block: int = 2**22) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, read by the documented format; checksums are verified."""
    described = json.loads((path / "manifest.json").read_text())
    tensors = {}
    for name, tensor in described["tensors"].items():
        dtype = getattr(torch, tensor["dtype"])
        values, filled = torch.zeros(tensor["shape"], dtype=dtype), torch.zeros(tensor["shape"], dtype=torch.bool)
        for box in tensor["boxes"]:
            count = math.prod(box["size"])
            with (path / box["file"]).open("rb") as file:
                file.seek(box["start"])
                data = file.read(count * dtype.itemsize)
            sums = [zlib.crc32(data[: start + block]) for start in range(0, len(data), block)]
            assert "".join(f"{each:08x}" for each in sums) == box["checksums"], f"{name}: another checksum"
            part = torch.frombuffer(bytearray(data), dtype=dtype).view(box["size"])
            place = tuple(slice(o, o + s) for o, s in zip(box["offset"], box["size"], strict=True))
            assert not filled[place].any(), f"{name}: boxes overlap"
            values[place], filled[place] = part, True
        assert filled.all(), f"{name}: boxes are missing"
        tensors[name] = values
    return tensors


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Yield a list of the reads of tensors within the context, in bytes per read."""
    read: list[int] = []
    real = os.preadv

    def counting(*arguments: Any) -> int:
        read.append(real(*arguments))
        return read[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counting)
        yield read


@st.composite
def cuts(draw: st.DrawFn, tensors: dict[str, Tensor]) -> list[list[Placed]]:
    """Draw a split of the tensors into boxes, along any dimensions, distributed over files in any order."""
    files: list[list[Placed]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for name, tensor in tensors.items():
        boxes = [Box((0,) * tensor.ndim, tuple(tensor.shape))]
        for _ in range(draw(st.integers(0, 4))):
            box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
            dimension = draw(st.integers(0, tensor.ndim - 1))
            boxes += split(box, dimension, draw(st.integers(0, box.size[dimension])))
        for box in draw(st.permutations(boxes)):
            files[draw(st.integers(0, len(files) - 1))].append((name, box))
    return files


def split(box: Box, dimension: int, at: int) -> list[Box]:
    """Return the two parts of a box before and after an index of a dimension (counted within the box), without empty
    ones."""

    def part(start: int, length: int) -> Box:
        offset, size = list(box.offset), list(box.size)
        offset[dimension] += start
        size[dimension] = length
        return Box(tuple(offset), tuple(size))

    return [part(start, length) for start, length in ((0, at), (at, box.size[dimension] - at)) if length]

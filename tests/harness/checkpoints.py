"""Checkpoints of given tensors, cut as a test says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from megalite.checkpoint import Manifest, TrainingState, manifest, saving, tensor_file
from megalite.checkpoint.attempt import FolderAttempt
from megalite.checkpoint.manifest import SavedBox, SavedTensor
from megalite.parallel.sharding import Box

STATE = TrainingState(iteration=7, consumed_samples=28, optimizer_steps=6)

Placed = tuple[str, Box]


def write(
    folder: Path,
    tensors: dict[str, Tensor],
    files: Sequence[Sequence[Placed]] | None = None,
    training: TrainingState = STATE,
    config: dict[str, Any] | None = None,
) -> Path:
    """Save tensors into a run directory; `files`: the boxes of each file (None: one file, of whole tensors)."""
    files = files or [[(name, Box((0,) * tensor.ndim, tuple(tensor.shape))) for name, tensor in tensors.items()]]
    attempt = FolderAttempt(folder, training.iteration)
    attempt.begin()
    boxes: dict[str, list[SavedBox]] = {name: [] for name in tensors}
    sizes = {}
    for number, placed in enumerate(files):
        path = attempt.file(f"rank_{number:05d}.safetensors")
        named = [(manifest.entry(name, box), tensors[name][box.slices()]) for name, box in placed]
        for (name, box), checksum in zip(placed, tensor_file.write(path, named), strict=True):
            boxes[name].append(SavedBox(name, box, path.name, checksum))
        sizes[path.name] = path.stat().st_size
    saved = {
        name: SavedTensor(tuple(tensor.shape), tensor_file.dtype_name(tensor.dtype), tuple(boxes[name]))
        for name, tensor in tensors.items()
    }
    saving.finish(attempt, Manifest(training, config or {"model": {"hidden_size": 8}}, sizes, saved))
    return attempt.path


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, from the format as documented."""
    described = json.loads((path / "manifest.json").read_text())
    tensors = {}
    for name, tensor in described["tensors"].items():
        values = torch.full(tensor["shape"], torch.nan, dtype=getattr(torch, tensor["dtype"]))
        for box in tensor["boxes"]:
            with safe_open(path / box["file"], "pt") as file:
                part = file.get_tensor(f"{name}@{','.join(map(str, box['offset']))}")
            place = tuple(slice(o, o + s) for o, s in zip(box["offset"], box["size"], strict=True))
            assert values[place].isnan().all(), f"{name}: boxes overlap"
            values[place] = part
        tensors[name] = values
    return tensors


@st.composite
def cuts(draw: st.DrawFn, tensors: dict[str, Tensor]) -> list[list[Placed]]:
    """Any way to cut the tensors into boxes, by splits along any dimension, dealt to any files in any order."""
    files: list[list[Placed]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for name, tensor in tensors.items():
        boxes = [Box((0,) * tensor.ndim, tuple(tensor.shape))]
        for _ in range(draw(st.integers(0, 4))):
            box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
            dimension = draw(st.integers(0, tensor.ndim - 1))
            boxes += _split(box, dimension, draw(st.integers(0, box.size[dimension])))
        for box in draw(st.permutations(boxes)):
            files[draw(st.integers(0, len(files) - 1))].append((name, box))
    return files


def _split(box: Box, dimension: int, at: int) -> list[Box]:
    """The two parts of a box before and behind an index of a dimension, counted in the box; none that are empty."""

    def part(start: int, length: int) -> Box:
        offset, size = list(box.offset), list(box.size)
        offset[dimension] += start
        size[dimension] = length
        return Box(tuple(offset), tuple(size))

    return [part(start, length) for start, length in ((0, at), (at, box.size[dimension] - at)) if length]

"""How the tensors of a file are made of logical tensors: one description, by which both are read from the other.

A tensor of a file is looked at in such a way that a part of it has the shape of a box of a logical tensor. Looking
copies nothing: the same view of a file's tensor is read from, or written to.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor

from megalite.checkpoint.manifest import covers, dtype_name
from megalite.checkpoint.source import Kind, Source, widest
from megalite.config import ModelConfig
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box

Index = tuple[int | slice, ...]
View = Callable[[Tensor], Tensor]
_MOST_PROBLEMS = 5
"""Problems that a message has, each of a tensor: often all are wrong for one reason."""


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor in a file's tensor."""

    tensor: str
    """The logical tensor's name; that of a layer's without `layers.N.` in front, in a rule for each layer. In a rule
    for each expert the experts are its first axis, which everything else here leaves out."""
    index: Index = ()
    """Where it stands in the file's tensor, as that is looked at."""
    offset: tuple[int, ...] = ()
    """The box's first corner; zeros at its end may be left out."""


@dataclass(frozen=True)
class Rule:
    """What a tensor of the files is. It applies where the model has the logical tensors named."""

    file: str
    """Its name, with {layer} in it where each layer has one, and {expert} where each expert has: a rule for a tensor
    that has all experts is a rule like others."""
    pattern: str
    """How to look at it: an einops pattern that only splits and moves axes. Axes: those of `axis_lengths`."""
    pieces: tuple[Piece, ...] | Callable[[ModelConfig], tuple[Piece, ...]]


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the files, and the boxes of logical tensors in it."""

    name: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[str, Box, View], ...]
    """The logical tensor's name, the box, and the view that has its shape of a tensor of `shape`."""


def axis_lengths(model: ModelConfig) -> dict[str, int]:
    """What the axes in the patterns of rules are called, and how long they are."""
    heads, groups = model.num_attention_heads, model.kv_groups
    return {
        "hidden": model.hidden_size,
        "heads": heads,
        "groups": groups,
        "heads_and_two": heads // groups + 2,
        "width": model.head_dim,
        "ffn": model.ffn_size,
        "vocabulary": model.vocab_size or 0,
        "positions": model.max_position_embeddings or 0,
        "two": 2,
        "three": 3,
    }


def file_tensors(rules: Iterable[Rule], model: ModelConfig, logical: Mapping[str, tuple[int, ...]]) -> list[FileTensor]:
    """The tensors of the files of a model, by the rules of its family.

    logical: the shapes of the model's logical tensors, by name. Raises CheckpointError where the rules, for one of
    them, have no place, or two.
    """
    found = []
    for rule in rules:
        for layer in range(model.num_layers) if "{layer}" in rule.file else (None,):
            found += _file_tensors(rule, model, logical, layer)
    boxes: dict[str, list[Box]] = {name: [] for name in logical}
    for name, box, _ in (each for tensor in found for each in tensor.boxes):
        boxes[name].append(box)
    for name, shape in logical.items():
        if not covers(boxes[name], Box.whole(shape)):
            raise CheckpointError(f"{name} {list(shape)} has no place in files of this family")
    return found


def _file_tensors(
    rule: Rule, model: ModelConfig, logical: Mapping[str, tuple[int, ...]], layer: int | None
) -> list[FileTensor]:
    """The tensors of a rule, in a layer: one, or one for each expert; none where the model has none."""
    prefix = "" if layer is None else f"layers.{layer}."
    pieces = rule.pieces(model) if callable(rule.pieces) else rule.pieces
    if not all(prefix + piece.tensor in logical for piece in pieces):
        return []
    lengths = axis_lengths(model)
    axes = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\w+", rule.pattern.split("->")[0])]
    shape = tuple(math.prod(lengths[name] for name in names) for names in axes)
    boxes = []
    for piece in pieces:
        view = partial(_view, rule.pattern, {name: lengths[name] for names in axes for name in names}, piece.index)
        size = tuple(view(torch.empty(shape, device="meta")).shape)
        offset = (*piece.offset, *(0,) * (len(size) - len(piece.offset)))
        boxes.append((prefix + piece.tensor, Box(offset, size), view))
    if sum(box.numel for _, box, _ in boxes) != math.prod(shape):
        raise ValueError(f"the pieces of {rule.file} are not all of it")
    if "{expert}" not in rule.file:
        return [FileTensor(rule.file.format(layer=layer), shape, tuple(boxes))]
    return [
        FileTensor(
            rule.file.format(layer=layer, expert=expert),
            shape,
            tuple(
                (name, Box((expert, *box.offset), (1, *box.size)), partial(_as_expert, view))
                for name, box, view in boxes
            ),
        )
        for expert in range(logical[boxes[0][0]][0])
    ]


def _as_expert(view: View, values: Tensor) -> Tensor:
    """Look at an expert's tensor as at one that has all experts, and of these one."""
    return view(values).unsqueeze(0)


def _view(pattern: str, lengths: Mapping[str, int], index: Index, values: Tensor) -> Tensor:
    return rearrange(values, pattern, **lengths)[index]


class Files(Protocol):
    """The tensors of a folder's files."""

    @property
    def tensors(self) -> Mapping[str, Kind]:
        """By name."""

    def tensor(self, name: str) -> Tensor:
        """A whole tensor: its memory, or what stands for it in a file that is mapped. Raises CheckpointError."""


class FromFiles:
    """The logical tensors of a model, read from files (a `Source`)."""

    def __init__(self, files: Files, mapping: Sequence[FileTensor], logical: Mapping[str, tuple[int, ...]]) -> None:
        """Raises CheckpointError where the files lack a tensor, or have one of another shape."""
        self._files = files
        self._boxes: dict[str, list[tuple[FileTensor, Box, View]]] = {name: [] for name in logical}
        dtypes: dict[str, torch.dtype] = {}
        problems = []
        for tensor in mapping:
            kind = files.tensors.get(tensor.name)
            if kind is None or kind.shape != tensor.shape:
                there = "is missing" if kind is None else f"has shape {list(kind.shape)}"
                problems.append(f"{tensor.name} {there} where the model has {list(tensor.shape)}")
                continue
            if not kind.dtype.is_floating_point:
                problems.append(f"{tensor.name} is {dtype_name(kind.dtype)} where weights are floating point")
                continue
            for name, box, view in tensor.boxes:
                self._boxes[name].append((tensor, box, view))
                dtypes[name] = torch.promote_types(dtypes.get(name, kind.dtype), kind.dtype)
        if problems:
            more = [f"and {len(problems) - _MOST_PROBLEMS} more"] * (len(problems) > _MOST_PROBLEMS)
            problems = ["the files are not of the model that is described:", *problems[:_MOST_PROBLEMS], *more]
            raise CheckpointError("\n".join(problems))
        self.tensors = {name: Kind(shape, dtypes[name]) for name, shape in logical.items()}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """As in `Source`."""
        for tensor, held, view in self._boxes[name]:
            both = held.intersection(box)
            if both is not None:
                part = view(self._files.tensor(tensor.name))[both.relative_to(held).slices()]
                values[both.relative_to(box).slices()].copy_(part)


class ToFiles:
    """The tensors of files, read from logical tensors (a `Source`).

    Where the boxes of a tensor stand one behind the other in it, any run of its elements is read by itself; else it is
    put together whole, and the last one of each thread is kept.
    """

    def __init__(self, logical: Source, mapping: Sequence[FileTensor], dtype: torch.dtype | None = None) -> None:
        """`dtype`: what to cast to; None: as they are, the widest where one is made of several."""
        self._logical, self._mapping = logical, {tensor.name: tensor for tensor in mapping}
        self._runs = {tensor.name: _runs(tensor) for tensor in mapping}
        self._last = threading.local()
        self.tensors = {
            tensor.name: Kind(tensor.shape, dtype or widest(logical.tensors[name] for name, _, _ in tensor.boxes))
            for tensor in mapping
        }

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """As in `Source`."""
        start, shape = _flat_index(box.offset, self.tensors[name].shape), self.tensors[name].shape
        runs = self._runs[name]
        if runs is not None and _is_run(box, shape) and values.is_contiguous():
            flat = values.view(-1)
            for first, logical, held in runs:
                for part, position in held.flat_range(
                    max(start - first, 0), min(start + box.numel - first, held.numel)
                ):
                    at = first + position - start
                    self._logical.fill(logical, part, flat[at : at + part.numel].view(part.size))
            return
        if getattr(self._last, "name", None) != name:
            self._last.values = None  # so that two are never there at once
            self._last.values, self._last.name = self._whole(name), name
        values.copy_(self._last.values[box.slices()])

    def _whole(self, name: str) -> Tensor:
        kind = self.tensors[name]
        whole = torch.zeros(kind.shape, dtype=kind.dtype)
        for logical, box, view in self._mapping[name].boxes:
            self._logical.fill(logical, box, view(whole))
        return whole


def _runs(tensor: FileTensor) -> list[tuple[int, str, Box]] | None:
    """The boxes of a tensor, each with its first element's number in it; None where some do not stand in one piece."""
    whole = torch.empty(tensor.shape, device="meta")
    views = [(view(whole), logical, box) for logical, box, view in tensor.boxes]
    if not all(view.is_contiguous() for view, _, _ in views):
        return None
    return [(int(view.storage_offset()), logical, box) for view, logical, box in views]


def _flat_index(corner: Sequence[int], shape: Sequence[int]) -> int:
    """The number of an element in row-major order."""
    return reduce(lambda number, axis: number * axis[1] + axis[0], zip(corner, shape, strict=True), 0)


def _is_run(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box of a tensor is a run of its elements in row-major order."""
    first = next((axis for axis, size in enumerate(box.size) if size > 1), len(shape))
    return box.size[first + 1 :] == tuple(shape[first + 1 :])

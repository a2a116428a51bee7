"""Mapping between tensors in files and logical tensors. One description is used for reading and for writing.

The mapping views a tensor of a file in such a way that an index into the view has the shape of a box of a logical
tensor. A view copies nothing, so the same view can be read from and written to.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor

from megalite.checkpoint.integrity import covers
from megalite.checkpoint.manifest import STATE, dtype_name
from megalite.checkpoint.tensors import Kind, Source, widest
from megalite.config import ModelConfig
from megalite.conversion.layers_of_files import begins_by_layer, mixer_axis_lengths
from megalite.conversion.opened import cast_to
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box

Index = tuple[int | slice | None, ...]
View = Callable[[Tensor], Tensor]
Stored = Mapping[str, tuple[Kind, Callable[[], Tensor]]]
"""Tensors of files by name, each with the function that reads it."""
_MOST_PROBLEMS = 5
"""Maximum number of problems in a message. There is one per tensor, and often all have the same cause."""


@dataclass(frozen=True)
class MappedBox:
    """Box of a logical tensor, stored in a tensor of the files."""

    tensor: str
    """Name of the logical tensor, without `layers.N.` in a rule that applies per layer, and without `mtp.D.` in one
    for what a depth has beside its layers. State is `state/NAME`.

    In a rule that applies per expert, the first axis of the logical tensor is the experts. All other fields of this
    class leave out this axis.
    """
    index: Index = ()
    """Index of the box in the view of the file's tensor."""
    offset: tuple[int, ...] = ()
    """First corner of the box in the logical tensor. Zeros at the end may be left out."""
    pattern: str | None = None
    """View of what `index` gives, an einops pattern as that of the rule; None: as it is."""


@dataclass(frozen=True)
class Rule:
    """Rule for a tensor of the files. It applies if the model has the logical tensors that it names."""

    file: str
    """Name of the tensor, with {layer} if there is one tensor per layer, and {expert} if there is one per expert.

    If one tensor has all experts, the name has no {expert}.
    """
    pattern: str
    """View of the tensor: an einops pattern that only splits and moves axes. `axis_lengths` defines the axes."""
    pieces: tuple[MappedBox, ...] | Callable[[ModelConfig], tuple[MappedBox, ...]]


QUERY = "(heads width) hidden -> heads width hidden", "(heads width) -> heads width"
ATTENTION_OUTPUT = "hidden (heads width) -> hidden heads width", "hidden -> hidden"
UP = "ffn hidden -> ffn hidden", "ffn -> ffn"
DOWN = "hidden ffn -> hidden ffn", "hidden -> hidden"
"""Patterns for `linear`, of the weight and of the bias, for files that store weights as [outputs, inputs]."""


def linear(file: str, patterns: tuple[str, str], *pieces: MappedBox) -> tuple[Rule, Rule]:
    """Return the rules for the weight and the bias of a linear layer, with the same boxes for both.

    The rule for the bias applies only if the model has biases.
    """
    of_bias = tuple(replace(piece, tensor=f"{piece.tensor}_bias") for piece in pieces)
    return Rule(f"{file}.weight", patterns[0], pieces), Rule(f"{file}.bias", patterns[1], of_bias)


def norm(file: str, tensor: str, axis: str = "hidden", *, joint: str = ".") -> tuple[Rule, Rule]:
    """Return the rules for the weight and the bias, if any, of a norm. `joint` is the text before these two words."""
    weight, bias = (
        Rule(f"{file}{joint}{part}", f"{axis} -> {axis}", (MappedBox(f"{tensor}.{part}"),))
        for part in ("weight", "bias")
    )
    return weight, bias


def table(file: str, rows: str, tensor: str) -> Rule:
    """Return the rule for an embedding or an output layer, with one row per token or position."""
    return Rule(file, f"{rows} hidden -> {rows} hidden", (MappedBox(tensor),))


@dataclass(frozen=True)
class FileTensor:
    """Tensor in the files, with the boxes of logical tensors that it stores."""

    name: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[str, Box, View], ...]
    """Boxes as (logical tensor, box, function that views a tensor of `shape` in the shape of the box)."""


def axis_lengths(model: ModelConfig) -> dict[str, int]:
    """Return the length of each axis that the patterns of the rules can have, by name."""
    heads, groups = model.num_attention_heads, model.kv_groups
    return {
        "hidden": model.hidden_size,
        "heads": heads,
        "groups": groups,
        "of_group": heads // groups * (1 + model.attention_output_gate) + 2,
        "width": model.head_dim,
        "half_width": model.head_dim // 2,
        "ffn": model.ffn_size,
        "experts": model.num_experts or 0,
        "expert_ffn": model.expert_ffn_size,
        "expert_hidden": model.expert_hidden_size,
        "shared_ffn": model.moe_shared_expert_intermediate_size or 0,
        "1": 1,
        "one": 1,
        **mixer_axis_lengths(model),
        "vocabulary": model.vocab_size or 0,
        "positions": model.max_position_embeddings or 0,
        "two": 2,
        "three": 3,
    }


def file_tensors(
    rules: Iterable[Rule], model: ModelConfig, logical: Mapping[str, tuple[int, ...]], halves: int = 2
) -> list[FileTensor]:
    """Return the tensors of a model's files, by the rules of its family.

    `logical`: shapes of the model's logical tensors, by name. `halves`: number of halves of a layer of the files.
    Raises CheckpointError if the rules do not store each element of a logical tensor exactly once.
    """
    found = []
    layers = begins_by_layer(model, halves)
    for rule in rules:
        for layer in range(len(layers)) if "{layer}" in rule.file else (None,):
            found += _file_tensors(rule, model, logical, layer, {} if layer is None else layers[layer])
    boxes: dict[str, list[Box]] = {name: [] for name in logical}
    for name, box, _ in (each for tensor in found for each in tensor.boxes):
        boxes[name].append(box)
    for name, shape in logical.items():
        if not covers(boxes[name], Box.whole(shape)):
            raise CheckpointError(f"{name} {list(shape)} does not belong in files of this family")
    return found


def axes_of(pattern: str) -> list[list[str]]:
    """Return the axes of the tensor that a pattern views, each with the axes that it is made of."""
    return [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\w+", pattern.split("->")[0])]


def _file_tensors(
    rule: Rule,
    model: ModelConfig,
    logical: Mapping[str, tuple[int, ...]],
    layer: int | None,
    begins: Mapping[str, str],
) -> list[FileTensor]:
    """Return the tensors of a rule in one layer: one tensor, one per expert, or none if the rule does not apply."""
    pieces = rule.pieces(model) if callable(rule.pieces) else rule.pieces
    named = (piece.tensor if layer is None else _name_in_layer(piece.tensor, begins) for piece in pieces)
    names = [name for name in named if name is not None and name in logical]
    if len(names) < len(pieces):
        return []
    lengths = axis_lengths(model)
    shape = tuple(math.prod(lengths[name] for name in names) for names in axes_of(rule.pattern))
    found = []
    for expert in range(logical[names[0]][0]) if "{expert}" in rule.file else (None,):
        boxes = []
        for logical_name, piece in zip(names, pieces, strict=True):
            index, offset = piece.index, piece.offset
            if expert is not None:  # the box has an axis of experts, of length 1
                index, offset = (None, *index), (expert, *offset)
            view = partial(_view, rule.pattern, lengths, index, piece.pattern)
            size = tuple(view(torch.empty(shape, device="meta")).shape)
            corner = (*offset, *(0,) * (len(size) - len(offset)))
            boxes.append((logical_name, Box(corner, size), view))
        if sum(box.numel for _, box, _ in boxes) != math.prod(shape):
            raise ValueError(f"the pieces of {rule.file} are not all of it")
        found.append(FileTensor(rule.file.format(layer=layer, expert=expert), shape, tuple(boxes)))
    return found


def _name_in_layer(tensor: str, begins: Mapping[str, str]) -> str | None:
    """Return the name of a logical tensor that a rule names in a layer; None if the layer has no such tensor."""
    kind = STATE if tensor.startswith(STATE) else ""
    local = tensor.removeprefix(STATE)
    begin = begins.get(local.partition(".")[0])
    return None if begin is None else f"{kind}{begin}.{local}"


def _view(pattern: str, lengths: Mapping[str, int], index: Index, of_part: str | None, values: Tensor) -> Tensor:
    part = _arranged(values, pattern, lengths)[index]
    return part if of_part is None else _arranged(part, of_part, lengths)


def _arranged(values: Tensor, pattern: str, lengths: Mapping[str, int]) -> Tensor:
    named = {name for names in axes_of(pattern) for name in names} - {"1"}
    return rearrange(values, pattern, **{name: lengths[name] for name in named})


class Files(Protocol):
    """Tensors in the files of a folder."""

    @property
    def tensors(self) -> Mapping[str, Kind]:
        """Tensors' shapes and dtypes, by name."""

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor, in memory or as a view of a mapped file. Raises CheckpointError."""


class FromFiles:
    """Logical tensors of a model that are read from files (a `Source`)."""

    def __init__(self, files: Files, mapping: Sequence[FileTensor], logical: Mapping[str, tuple[int, ...]]) -> None:
        """Check the files.

        Raises CheckpointError if a tensor is missing, has another shape, or is not floating point.
        """
        self._files = files
        self._boxes: dict[str, list[tuple[FileTensor, Box, View]]] = {name: [] for name in logical}
        dtypes: dict[str, torch.dtype] = {}
        problems = []
        for tensor in mapping:
            kind = files.tensors.get(tensor.name)
            if kind is None or kind.shape != tensor.shape:
                there = "is missing" if kind is None else f"has shape {list(kind.shape)}"
                problems.append(f"{tensor.name} {there}, but the model has {list(tensor.shape)}")
                continue
            if not kind.dtype.is_floating_point:
                problems.append(f"{tensor.name} is {dtype_name(kind.dtype)}, but weights are floating point")
                continue
            for name, box, view in tensor.boxes:
                self._boxes[name].append((tensor, box, view))
                dtypes[name] = torch.promote_types(dtypes.get(name, kind.dtype), kind.dtype)
        if problems:
            more = [f"and {len(problems) - _MOST_PROBLEMS} more"] * (len(problems) > _MOST_PROBLEMS)
            problems = ["the files do not fit the model that is described:", *problems[:_MOST_PROBLEMS], *more]
            raise CheckpointError("\n".join(problems))
        self.tensors = {name: Kind(shape, dtypes[name]) for name, shape in logical.items()}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        for tensor, held, view in self._boxes[name]:
            both = held.intersection(box)
            if both is not None:
                part = view(self._files.tensor(tensor.name))[both.relative_to(held).slices()]
                values[both.relative_to(box).slices()].copy_(part)


class LastTensor(threading.local):
    """Cache that holds one tensor per thread."""

    key: object = None
    values: Tensor | None = None

    def get(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor for `key`: the cached one if it has this key, otherwise a new one that replaces it."""
        if self.values is None or self.key != key:
            self.values = None  # so that two tensors are never in memory at once
            self.values, self.key = make(), key
        return self.values


class ToFiles:
    """Tensors of files that are read from logical tensors (a `Source`).

    If the boxes of a tensor are contiguous in it, one after the other, any range of its elements is read directly.
    Otherwise, the whole tensor is assembled first, and each thread keeps the last one.
    """

    def __init__(
        self,
        logical: Source,
        mapping: Sequence[FileTensor],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        precise: Container[str] = (),
    ) -> None:
        """Create the source.

        `dtype`: dtype to cast weights to; None: no cast, or the widest dtype if a tensor is made of several. Modules'
        state is never cast. `device`: device on which tensors are assembled; None: the CPU. `precise`: logical tensors
        that are cast to no dtype narrower than fp32.
        """
        self._logical, self._mapping, self._device = logical, {tensor.name: tensor for tensor in mapping}, device
        self._runs = {tensor.name: _runs(tensor) for tensor in mapping}
        self._last = LastTensor()
        self.tensors = {
            tensor.name: Kind(
                tensor.shape,
                cast_to(None if tensor.boxes[0][0].startswith(STATE) else dtype, tensor.boxes[0][0] in precise)
                or widest(logical.tensors[name] for name, _, _ in tensor.boxes),
            )
            for tensor in mapping
        }

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """Fill `values` with a box of a file's tensor: straight from the run's elements if they lie in a row there."""
        stored = self._runs[name]
        runs = list(islice(Box.whole(self.tensors[name].shape).runs_of(box), 2))
        if stored is not None and len(runs) == 1 and values.is_contiguous():
            start, stop = runs[0]
            flat = values.view(-1)
            for first, logical, held in stored:
                for part, position in held.flat_range(max(start - first, 0), min(stop - first, held.numel)):
                    at = first + position - start
                    self._logical.fill(logical, part, flat[at : at + part.numel].view(part.size))
            return
        values.copy_(self._last.get(name, partial(self._whole, name))[box.slices()])

    def _whole(self, name: str) -> Tensor:
        kind = self.tensors[name]
        whole = torch.zeros(kind.shape, dtype=kind.dtype, device=self._device)
        for logical, box, view in self._mapping[name].boxes:
            self._logical.fill(logical, box, view(whole))
        return whole


def _runs(tensor: FileTensor) -> list[tuple[int, str, Box]] | None:
    """Return the boxes of a tensor, each with the position of its first element; None if one is not contiguous."""
    whole = torch.empty(tensor.shape, device="meta")
    views = [(view(whole), logical, box) for logical, box, view in tensor.boxes]
    if not all(view.is_contiguous() for view, _, _ in views):
        return None
    return [(int(view.storage_offset()), logical, box) for view, logical, box in views]

"""Traces of SGLang's dumper, which other programs use as well: step=0___rank=0___dump_index=1___name=....pt.

Each file has {"value": tensor, "meta": {...}}. Names are those that a program gives, or, of its hooks on modules,
non_intrusive__MODULE.inputs.0 and non_intrusive__MODULE.output; param__NAME of parameters; grad__ before them. Modules
of Megatron-LM number the layers of a pipeline stage's chunk; the number in the whole network is the tag layer_id.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalite.errors import CheckpointError, ConfigurationError
from megalite.extras.verify.readers.gathering import (
    FIRST_ARGUMENTS,
    MOST_RANKS,
    Gathering,
    TensorFiles,
    absent,
    batch,
    chosen_step,
    listed,
    plain_name,
    refuse,
)
from megalite.extras.verify.trace import Entry, Place, Role, Split, Trace
from megalite.restricted_pickle import StoredTensor
from megalite.small_files import is_count

_FILE = re.compile(r"(?:step|forward_pass_id|curr_step)=(\d{1,15})___rank=(\d{1,9})___(.+)\.pt", re.DOTALL)
_HOOKED = re.compile(r"non_intrusive__(.+)\.(?:inputs\.(\w+)|output(?:\.(\d{1,4}))?)")
_ROOT = re.compile(r"non_intrusive__inputs\.(\w+)")
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})(?=\.|$)")
_AXES = {
    "megatron_parallel_info": {axis: axis for axis in ("tp", "pp", "cp", "dp", "ep", "etp", "edp")},
    "sglang_parallel_info": {"tp": "tp", "pp": "pp", "attn_cp": "cp", "attn_dp": "dp", "moe_ep": "ep"},
}
_BATCH = {"labels": "labels", "loss_mask": "loss_mask", "position_ids": "positions", "positions": "positions"}
_TOKENS = "input_ids"
_DIMENSION = re.compile(r"(1|[A-Za-z_]\w*|\([\w*]+\))(?:[\[(]([^\])]+)[\])])?")
_LETTERS = {"b": "b", "1": "b", "s": "s", "t": "t"}
_SHARED = {"sp": "tp", "recompute_pseudo": ""}
"""Axes of annotations that are another one of the ranks', or none."""


def owns(path: Path) -> bool:
    """Tell whether a folder has such files, or a folder within it."""
    return bool(_folders(path))


def read(path: Path, step: int | None) -> Trace:
    """Read the files of a step, which is the first one if `step` is None.

    Raises:
        ConfigurationError: the step is not there, or there are several dumps.
        CheckpointError, DataError: the files cannot be read, or have nothing to compare.
    """
    folders = _folders(path)
    if len(folders) > 1:
        names = ", ".join(folder.name for folder in folders[:20])
        raise ConfigurationError(f"{path} has several dumps of SGLang's dumper ({names}): name one of these folders")
    steps: dict[int, list[Path]] = defaultdict(list)
    for file in listed(folders[0]):
        if match := _FILE.fullmatch(file.name):
            steps[int(match[1]) + 1].append(file)
    step, dropped = chosen_step(path, steps, step)
    trace = Trace("", "SGLang's dumper", step, dropped=dropped)
    gathering = Gathering(path, trace)
    gathering.note(f"SGLang's dumper counts the steps of a program from 0: its step {step - 1} is step {step} here")
    reader = _Reader(TensorFiles(folders[0]), gathering)
    dumps = sorted(reader.dumps(steps[step]), key=lambda dump: (dump.rank, dump.index))
    reader.add_modules(dumps)
    reader.add_parameters(dumps)
    reader.add_batches(dumps)
    trace.missing = absent((reader.world_size - 1, *trace.coordinates), trace.coordinates)
    return gathering.finish()


def _folders(path: Path) -> list[Path]:
    """Return the folders that have such files: the folder itself, or else some within it."""
    inner = listed(path)
    if any(_FILE.fullmatch(each.name) for each in inner):
        return [path]
    return [each for each in inner if any(_FILE.fullmatch(file.name) for file in listed(each))]


@dataclass(frozen=True)
class _Dump:
    """A recorded tensor, as its file describes it.

    Attributes:
        index: number of the dump on its rank, in the order of time.
        name: the name, without `grad__`.
        layer: the number of the layer in the whole network that was set when it was recorded.
        dimensions: the annotation of its dimensions; empty if there is none.
        keys: where in the file it is.
    """

    file: Path
    rank: int
    index: int
    name: str
    gradient: bool
    layer: int | None
    recomputed: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    dimensions: str
    keys: tuple[str, ...]


@dataclass
class _Reader:
    """Reader of the files of one step."""

    files: TensorFiles
    gathering: Gathering
    world_size: int = 0

    def dumps(self, files: Sequence[Path]) -> Iterator[_Dump]:
        """Yield the tensors of files. Raises DataError if there are too many."""
        for file in files:
            self.gathering.visit()
            try:
                content = self.files.contents(file)
                found = self._dump(file, content)
            except CheckpointError as error:
                self.gathering.skip(error)
                continue
            if found is None:
                self.gathering.leave_out("are no tensors")
            else:
                yield found

    def _dump(self, file: Path, content: Any) -> _Dump | None:
        """Return the tensor of a file; None if it has another value."""
        named = isinstance(content, dict) and "value" in content
        value, meta = (content["value"], content.get("meta")) if named else (content, {})
        if not isinstance(meta, dict):
            refuse(file, "has no description of its tensor")
        if not isinstance(value, StoredTensor):
            return None
        tags: dict[str, Any] = dict(pair.partition("=")[::2] for pair in file.stem.split("___"))
        name = meta.get("name", tags.get("name", ""))
        index, rank = tags.get("dump_index", "0"), int(tags["rank"])
        if not isinstance(name, str) or not re.fullmatch(r"\d{1,15}", index):
            refuse(file, "has no name or no number")
        layer = meta.get("layer_id")
        self._place_of(rank, meta)
        return _Dump(
            file,
            rank,
            int(index),
            name.removeprefix("grad__"),
            name.startswith("grad__"),
            layer if is_count(layer, 10**6) else None,
            meta.get("recompute_status") == "recompute",
            value.shape,
            value.dtype,
            dims if isinstance(dims := meta.get("dims"), str) else "",
            ("value",) if named else (),
        )

    def _place_of(self, rank: int, meta: Mapping[str, Any]) -> None:
        """Take the place of a rank from the description of one of its tensors."""
        trace = self.gathering.trace
        found = dict(trace.coordinates.get(rank, {}))
        for key, axes in _AXES.items():
            info = meta.get(key)
            if not isinstance(info, dict):
                continue
            for theirs, axis in axes.items():
                index: Any = info.get(f"{theirs}_rank")
                count: Any = info.get(f"{theirs}_size")
                if is_count(count, MOST_RANKS) and is_count(index, count):
                    found[axis] = (index, count)
                    if key.startswith("megatron"):
                        trace.program = "megatron"
        trace.coordinates[rank] = found
        size: Any = meta.get("world_size")
        if is_count(size, MOST_RANKS):
            self.world_size = max(self.world_size, size)

    # --------------------------------------------------------------------------------------------- modules

    def add_modules(self, dumps: Sequence[_Dump]) -> None:
        """Add the inputs and outputs of modules, and their gradients: the k-th of a name is of micro-batch k."""
        layers = _layers(dumps)
        calls: Counter[tuple[int, str, Role, int]] = Counter()
        for dump in dumps:
            if dump.name.startswith("param__") or _is_batch(dump):
                continue
            if dump.recomputed:
                self.gathering.leave_out("were recomputed")
                continue
            described = _described(dump)
            if described is None:
                self.gathering.leave_out("are neither input nor output by position (keyword arguments)")
                continue
            name, role, number = described
            if match := _LAYER.match(name):
                local = int(match[1])
                numbers = {dump.layer} if dump.layer is not None else layers.get((dump.rank, local), {local})
                if len(numbers) > 1:
                    self.gathering.leave_out("are of a layer whose number in the whole network is not told")
                    continue
                name = _LAYER.sub(f"decoder.layers.{min(numbers)}", name, count=1)
            key = (dump.rank, name, role, number)
            self._add(dump, *key[1:], calls[key])
            calls[key] += 1

    def add_parameters(self, dumps: Sequence[_Dump]) -> None:
        """Add parameters as they were dumped first, and their gradients as they were dumped last."""
        values: dict[tuple[int, str], _Dump] = {}
        gradients: dict[tuple[int, str], _Dump] = {}
        for dump in dumps:
            if dump.name.startswith("param__"):
                key = (dump.rank, plain_name(dump.name.removeprefix("param__")))
                if dump.gradient:
                    gradients[key] = dump
                else:
                    values.setdefault(key, dump)
        for (_, name), dump in values.items():
            self._add(dump, name, "parameter", 0, 0)
        for (_, name), dump in gradients.items():
            self._add(dump, name, "gradient", 0, 0)

    def _add(self, dump: _Dump, name: str, role: Role, number: int, micro_batch: int) -> None:
        place = None
        if dump.dimensions:
            try:
                place = _place(dump.dimensions, dump.shape, self.gathering.trace.coordinates[dump.rank])
            except ValueError as error:
                self.gathering.note(f"the dimensions {dump.dimensions[:80]!r} are not used: {error}")
        read = partial(self.files.whole, dump.file, *dump.keys)
        entry = Entry(dump.rank, name, role, dump.shape, str(dump.file), read, number, micro_batch, place)
        self.gathering.add(entry, dump.dtype)

    # --------------------------------------------------------------------------------------------- batches

    def add_batches(self, dumps: Sequence[_Dump]) -> None:
        """Add the micro-batches whose tokens were recorded."""
        fields: dict[tuple[int, str], list[_Dump]] = defaultdict(list)
        for dump in dumps:
            if _is_batch(dump) and not dump.recomputed:
                fields[dump.rank, _field(dump)].append(dump)
        calls = Counter((entry.rank, entry.name) for entry in self.gathering.trace.entries if entry.role == "output")
        for rank in {rank for rank, name in fields if name == _TOKENS}:
            counts = Counter(count for (each, _), count in calls.items() if each == rank)
            usual = counts.most_common(1)[0][0] if counts else 0
            chosen = {name: _every(those, usual) for (each, name), those in fields.items() if each == rank}
            for micro_batch, tokens in enumerate(chosen.pop(_TOKENS)):
                others = {name: those[micro_batch] for name, those in chosen.items() if micro_batch < len(those)}
                try:
                    values = {name: self._values(dump) for name, dump in others.items()}
                    self.gathering.trace.batches.append(batch(rank, micro_batch, self._values(tokens), values))
                except CheckpointError as error:
                    self.gathering.skip(error)

    def _values(self, dump: _Dump) -> torch.Tensor:
        return self.files.whole(dump.file, *dump.keys).values


def _every(dumps: Sequence[_Dump], micro_batches: int) -> Sequence[_Dump]:
    """Return one dump a micro-batch: a network hands its tokens on to its embedding, and both may be recorded."""
    times, rest = divmod(len(dumps), micro_batches) if micro_batches else (1, 0)
    return dumps[::times] if times > 1 and not rest else dumps


def _field(dump: _Dump) -> str:
    match = _ROOT.fullmatch(dump.name)
    name = match[1] if match else dump.name
    return _BATCH.get(name, name)


def _is_batch(dump: _Dump) -> bool:
    """Tell whether this is a part of the micro-batch: a field that is recorded under its name, or an argument."""
    if dump.gradient or len(dump.shape) not in (1, 2) or 0 in dump.shape:
        return False
    return _field(dump) in (_TOKENS, *_BATCH.values())


def _layers(dumps: Sequence[_Dump]) -> Mapping[tuple[int, int], set[int]]:
    """Return the numbers in the whole network of the layers that a rank's names give a number."""
    found: dict[tuple[int, int], set[int]] = defaultdict(set)
    for dump in dumps:
        match = _HOOKED.fullmatch(dump.name)
        layer = _LAYER.match(plain_name(match[1])) if match else None
        if layer is not None and dump.layer is not None:
            found[dump.rank, int(layer[1])].add(dump.layer)
    return found


def _described(dump: _Dump) -> tuple[str, Role, int] | None:
    """Return the module, the role and the position; None for a keyword argument, or one of the whole network."""
    match = _HOOKED.fullmatch(dump.name)
    if match is not None:
        argument = match[2]
        if argument is None:
            return plain_name(match[1]), "output_gradient" if dump.gradient else "output", int(match[3] or 0)
        number = int(argument) if re.fullmatch(r"\d{1,4}", argument) else 0
        if number or argument.isdecimal() or argument in FIRST_ARGUMENTS:
            return plain_name(match[1]), "input_gradient" if dump.gradient else "input", number
        return None
    if dump.name.startswith("non_intrusive__"):
        return None
    name = dump.name if dump.layer is None else f"layers.{dump.layer}.{dump.name}"
    return name, "output_gradient" if dump.gradient else "output", 0


def _place(dimensions: str, shape: tuple[int, ...], coordinates: Mapping[str, tuple[int, int]]) -> Place:
    """Return the place that an annotation such as `b s[cp:zigzag] h[tp]` tells. Raises ValueError."""
    letters, splits, partials = "", list[Split](), list[str]()
    words = dimensions.partition("#")[0].split()
    if len(words) != len(shape):
        raise ValueError(f"it has {len(words)} dimensions, and the tensor {len(shape)}")
    for dimension, word in enumerate(words):
        match = _DIMENSION.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is not understood")
        letters += _LETTERS.get(match[1], "h")
        for name, words_on_it in _modifiers(match[2] or ""):
            axis = _SHARED.get(name, name)
            index, count = coordinates.get(axis, (0, 1))
            if count == 1:
                continue
            if "partial" in words_on_it:
                partials.append(axis)
            elif "zigzag" in words_on_it and letters[-1] == "t":
                raise ValueError("each of several samples is cut by itself")
            else:
                kind = "zigzag" if "zigzag" in words_on_it else "block"
                splits.append(Split(dimension, axis, index, count, kind))  # type: ignore[arg-type]
    return Place(letters, tuple(splits), tuple(partials))


def _modifiers(text: str) -> list[tuple[str, list[str]]]:
    """Return the axes of a dimension, the outermost first, and the words on each: `cp:zigzag+partial`, `cp,zigzag`."""
    found: list[tuple[str, list[str]]] = []
    for part in filter(None, text.split(",")):
        axis, _, words = part.strip().partition(":")
        if axis in ("zigzag", "natural", "partial", "sharded") and found:
            found[-1][1].append(axis)
        elif axis in ("tp", "cp", "ep", *_SHARED):
            found.append((axis, words.split("+")))
        else:
            raise ValueError(f"{axis!r} is no axis of ranks that is known")
    return found

"""Traces of `megalite_trace.py`: step_0000003/rank_00000.json, and the safetensors files that it names."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

import megalite_trace
from megalite.conversion.huggingface_files import open_safetensors
from megalite.conversion.mapping import Stored
from megalite.errors import CheckpointError
from megalite.extras.verify.evidence import Evidence, Sketched, Whole
from megalite.extras.verify.readers.gathering import (
    MOST_OPEN_FILES,
    Gathering,
    as_statistic,
    batch,
    chosen_step,
    refuse,
)
from megalite.extras.verify.readers.stages import layers_before, layers_of, with_layers_before
from megalite.extras.verify.trace import OF_MODULES, Entry, Place, RecordedBatch, Role, Split, Trace
from megalite.small_files import MOST_AXES, is_count, open_regular, read_json, reason, shown

_STEP, _RANK = re.compile(r"step_(\d{7,18})"), re.compile(r"rank_(\d{5,9})\.json")
_DATA = re.compile(r"rank_(\d{5,9})(_\d{4,9})?\.safetensors")
_BEGIN = f'{{"format": "{megalite_trace.FORMAT}", '.encode()
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
_DTYPES |= {name: getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2")}
_ROLES: tuple[Role, ...] = get_args(Role)
_DIMENSIONS = re.compile(r"[sbht]*")
_LONGEST_NAME = 1000
_MOST_RANKS = 100_000
_WIDTH = megalite_trace.MOST_PROJECTIONS + megalite_trace.SAMPLES
_Value = TypeVar("_Value")


def owns(path: Path) -> bool:
    """Tell whether a folder is a trace, or one of its steps."""
    return any(_is_ours(index) for ranks in _steps(path).values() for index in ranks.values())


def read(path: Path, step: int | None) -> Trace:
    """Read a step, which is the first one if `step` is None.

    Raises:
        ConfigurationError: the step is not there.
        CheckpointError, DataError: the files cannot be read, or have nothing to compare.
    """
    steps = _steps(path)
    step, dropped = chosen_step(path, steps, step)
    trace = Trace("", megalite_trace.FORMAT, step, dropped=dropped)
    gathering = Gathering(path, trace)
    ranks: dict[int, _Rank] = {}
    for number, file in steps[step].items():
        try:
            ranks[number] = _Rank(file, number, step, gathering)
        except CheckpointError as error:
            gathering.skip(error)
    world = ranks[min(ranks)].world_size if ranks else 0
    for number in [number for number, rank in ranks.items() if rank.world_size != world]:
        gathering.note(
            f"rank {number} is left out: it is of a run of {ranks.pop(number).world_size} ranks, not {world}"
        )
    trace.missing = tuple(number for number in range(world) if number not in ranks)
    for number, rank in ranks.items():
        trace.program = trace.program or rank.program
        trace.coordinates[number] = rank.coordinates
        trace.figures = {**rank.figures, **trace.figures}
        trace.batches += rank.batches
        for line in rank.notes:
            gathering.note(f"rank {number}: {line}")
        for recorded in rank.recorded:
            gathering.add(recorded.entry, recorded.dtype)
    gathering.finish()
    if trace.program == "megatron":
        _number_layers(trace, ranks)
    return trace


def _number_layers(trace: Trace, ranks: Mapping[int, _Rank]) -> None:
    """Change names to those of the whole network: Megatron-LM numbers the layers of each chunk from 0.

    Places by attributes of parameters are left to the rules of the program, which know what is split in pairs.
    """
    names: dict[tuple[int, int], list[str]] = defaultdict(list)
    stages = {number: rank.coordinates.get("pp", (0, 1)) for number, rank in ranks.items()}
    for number, rank in ranks.items():
        for recorded in rank.recorded:
            names[stages[number][0], recorded.chunk].append(recorded.entry.name)
    count = max((count for _, count in stages.values()), default=1)
    before = layers_before({place: layers_of(those) for place, those in names.items()}, count)
    recorded_as = {id(recorded.entry): recorded for rank in ranks.values() for recorded in rank.recorded}
    for number, entry in enumerate(trace.entries):
        recorded = recorded_as[id(entry)]
        trace.entries[number] = replace(
            entry,
            name=with_layers_before(entry.name, before[stages[entry.rank][0], recorded.chunk]),
            place=None if recorded.by_attributes else entry.place,
        )


# ------------------------------------------------------------------------------------------------- files


def _steps(path: Path) -> dict[int, dict[int, Path]]:
    """Return the index of each rank, by step."""
    folders = [path] if _STEP.fullmatch(path.name) else []
    if path.is_dir():
        folders += sorted(each for each in path.iterdir() if _STEP.fullmatch(each.name))
    found: dict[int, dict[int, Path]] = {}
    for folder in folders:
        match = _STEP.fullmatch(folder.name)
        names = sorted(folder.iterdir()) if folder.is_dir() else []
        ranks = {int(rank[1]): each for each in names if (rank := _RANK.fullmatch(each.name))}
        if match and ranks:
            found[int(match[1])] = ranks
    return found


def _is_ours(index: Path) -> bool:
    try:
        with open_regular(index, folder=index.parent) as file:
            return file.read(len(_BEGIN)) == _BEGIN
    except (OSError, ValueError):
        return False


class _Recorded(NamedTuple):
    entry: Entry
    dtype: torch.dtype
    chunk: int
    by_attributes: bool


@dataclass(frozen=True)
class _Where:
    """Tensor in a file: the number of the file, and the name in it."""

    file: int
    tensor: str


class _Rank:
    """Record of one rank."""

    def __init__(self, index: Path, rank: int, step: int, gathering: Gathering) -> None:
        """Read the index, and the headers of its files. Raises CheckpointError."""
        try:
            fields = read_json(index, folder=index.parent)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{index} cannot be read: {reason(error)}") from error
        self._index, self._rank = index, rank
        self._open = lru_cache(maxsize=MOST_OPEN_FILES)(open_safetensors)
        if not isinstance(fields, dict) or fields.get("format") != megalite_trace.FORMAT:
            refuse(index, "is no index of megalite_trace.py")
        if fields.get("version") != megalite_trace.VERSION:
            raise CheckpointError(
                f"{index} has version {shown(fields.get('version'))} of the format, and {megalite_trace.VERSION} is "
                "read: record it with the megalite_trace.py of this megalite"
            )
        if fields.get("rank") != rank or fields.get("step") != step:
            refuse(index, f"is of step {shown(fields.get('step'))}, rank {shown(fields.get('rank'))}")
        self.world_size = self._count(fields, "world_size", rank + 1, _MOST_RANKS)
        self.program = self._checked(fields, "program", str)
        self.seed = self._count(fields, "seed")
        self.notes = [str(line)[:300] for line in self._checked(fields, "notes", list)[:20]]
        self.coordinates = self._coordinates(self._checked(fields, "coordinates", dict))
        self.figures = dict(self._figures(self._checked(fields, "figures", dict)))
        self._files = self._paths(self._checked(fields, "files", list))
        self._sketches = self._place(fields["sketches"]) if "sketches" in fields else None
        self._rows = self._kind(self._sketches)[0] if self._sketches else ()
        if self._rows and (len(self._rows) != 2 or self._rows[1] != _WIDTH):
            refuse(index, f"has sketches of shape {list(self._rows)}")
        self.recorded = list(self._entries(self._checked(fields, "entries", list), gathering))
        self.batches = list(self._batches(self._checked(fields, "batches", list)))

    def _checked(self, fields: Mapping[str, Any], name: str, kind: type[_Value]) -> _Value:
        value = fields.get(name)
        if not isinstance(value, kind):
            refuse(self._index, f"has {shown(value)} where its {name} should stand")
        return value

    def _count(self, fields: Mapping[str, Any], name: str, least: int = 0, most: int = 2**31) -> int:
        value = fields.get(name)
        if not is_count(value) or not least <= value <= most:  # type: ignore[operator]
            refuse(self._index, f"has {shown(value)} where its {name} should stand")
        return int(value)  # type: ignore[arg-type]

    def _coordinates(self, found: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        return {axis: self._coordinate(axis, place) for axis, place in found.items()}

    def _coordinate(self, axis: str, place: Any) -> tuple[int, int]:
        if not isinstance(place, list) or len(place) != 2 or not all(map(is_count, place)):
            refuse(self._index, f"has {shown(place)} as the place on the axis {shown(axis)}")
        index, count = place
        if not index < count <= _MOST_RANKS:
            refuse(self._index, f"has {shown(place)} as the place on the axis {shown(axis)}")
        return index, count

    def _figures(self, found: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        for name, value in found.items():
            number = as_statistic(value)
            if number is None:
                refuse(self._index, f"has {shown(value)} as the figure {shown(name)}")
            yield name, number

    # --------------------------------------------------------------------------------------------- tensors

    def _paths(self, names: list[Any]) -> list[Path]:
        for name in names:
            match = _DATA.fullmatch(name) if isinstance(name, str) else None
            if match is None or int(match[1]) != self._rank:
                refuse(self._index, f"names {shown(name)} as one of its files")
        return [self._index.parent / name for name in names]

    def _place(self, fields: Any) -> _Where:
        if not isinstance(fields, dict) or not is_count(fields.get("file"), len(self._files)):
            refuse(self._index, "names a tensor without its file")
        return _Where(fields["file"], self._checked(fields, "tensor", str))

    def _kind(self, where: _Where) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a tensor. Raises CheckpointError if it is not there."""
        kind, _ = self._tensor(where)
        return kind.shape, kind.dtype

    def _tensor(self, where: _Where) -> tuple[Any, Callable[[], Tensor]]:
        stored: Stored = self._open(self._files[where.file])
        if where.tensor not in stored:
            refuse(self._files[where.file], f"has no tensor {shown(where.tensor)}, which its index names")
        return stored[where.tensor]

    def _entries(self, found: list[Any], gathering: Gathering) -> Iterator[_Recorded]:
        """Yield what was recorded, each tensor of a call once. Raises CheckpointError, DataError."""
        keys = set()
        for number, fields in enumerate(found):
            gathering.visit()
            if not isinstance(fields, dict):
                refuse(self._index, f"has {shown(fields)} as an entry")
            recorded = self._entry(number, fields)
            entry = recorded.entry
            key = (recorded.chunk, entry.name, entry.role, entry.number, entry.micro_batch)
            if key in keys:
                refuse(self._index, f"has {entry.role} {entry.number} of {entry.name} twice")
            keys.add(key)
            yield recorded

    def _entry(self, number: int, fields: Mapping[str, Any]) -> _Recorded:
        """Return one recorded tensor, whose values exist. Raises CheckpointError."""
        name, role = self._checked(fields, "name", str), fields.get("role")
        if len(name) > _LONGEST_NAME or not name.isprintable() or role not in _ROLES:
            refuse(self._index, f"has an entry {shown(name)} of role {shown(role)}")
        shape, dtype = fields.get("shape"), _DTYPES.get(self._checked(fields, "dtype", str))
        if not isinstance(shape, list) or len(shape) > MOST_AXES or not all(map(is_count, shape)) or dtype is None:
            refuse(self._index, f"has {name} of shape {shown(shape)} and type {shown(fields['dtype'])}")
        micro_batch = self._count(fields, "micro_batch")
        if micro_batch and role not in OF_MODULES:
            refuse(self._index, f"has {name} in micro-batch {micro_batch}, though it is of the whole step")
        entry = Entry(
            self._rank,
            name,
            role,
            tuple(shape),
            f"{self._index}: entry {number}",
            self._reader(fields, tuple(shape), dtype),
            self._count(fields, "number"),
            micro_batch,
            self._place_of(fields.get("place"), tuple(shape)),
        )
        by_attributes = entry.place is not None and fields["place"].get("of") == "attributes"
        return _Recorded(entry, dtype, self._count(fields, "chunk"), by_attributes)

    def _reader(self, fields: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Evidence]:
        if "sketch" in fields:
            row = fields["sketch"]
            if not self._rows or not is_count(row, self._rows[0]):
                refuse(self._index, f"has {shown(row)} as the number of a sketch")
            return partial(self._sketched, row, shape, dtype)
        where = self._place(fields)
        if self._kind(where) != (shape, dtype):
            refuse(self._index, f"has a tensor {shown(where.tensor)} of another shape or type than its file")
        return partial(self._whole, where)

    def _whole(self, where: _Where) -> Evidence:
        return Whole(self._tensor(where)[1]())

    def _sketched(self, row: int, shape: tuple[int, ...], dtype: torch.dtype) -> Evidence:
        assert self._sketches is not None
        values = self._tensor(self._sketches)[1]()[row]
        projections = values[: megalite_trace.projections_of(shape)].clone()
        samples = values[megalite_trace.MOST_PROJECTIONS :][: math.prod(shape)].clone()
        norm, finite = projections.square().mean().sqrt(), projections.isfinite().all()
        return Sketched(shape, dtype, float(norm), bool(finite), projections, samples, self.seed)

    def _place_of(self, found: Any, shape: tuple[int, ...]) -> Place | None:
        """Return the place of a tensor of this shape. Raises CheckpointError."""
        if found is None:
            return None
        dimensions = len(shape)
        letters = found.get("dimensions") if isinstance(found, dict) else None
        splits = found.get("splits") if isinstance(found, dict) else None
        partial_over = found.get("partial") if isinstance(found, dict) else None
        offset = found.get("offset") if isinstance(found, dict) else None
        if (
            not isinstance(letters, str)
            or _DIMENSIONS.fullmatch(letters) is None
            or len(letters) not in (0, dimensions)
            or not isinstance(splits, list)
            or not isinstance(partial_over, list)
            or not all(isinstance(axis, str) for axis in partial_over)
            or not (offset is None or _is_corner(offset, dimensions))
        ):
            refuse(self._index, f"has the place {shown(found)}")
        cuts = tuple(self._split(each, dimensions) for each in splits)
        return Place(letters, cuts, tuple(partial_over), None if offset is None else tuple(offset))

    def _split(self, found: Any, dimensions: int) -> Split:
        if not isinstance(found, list) or len(found) != 5 or found[4] not in ("block", "zigzag"):
            refuse(self._index, f"has the split {shown(found)}")
        dimension, axis, index, count, kind = found
        if not is_count(dimension, dimensions) or not isinstance(axis, str):
            refuse(self._index, f"has the split {shown(found)}")
        return Split(dimension, axis, *self._coordinate(axis, [index, count]), kind)

    def _batches(self, found: list[Any]) -> Iterator[RecordedBatch]:
        """Yield the micro-batches. Raises CheckpointError."""
        for fields in found:
            if not isinstance(fields, dict) or "tokens" not in fields:
                refuse(self._index, "has a micro-batch without tokens")
            tensors = {name: self._tensor(self._place(each))[1]() for name, each in fields.items() if name in _OF_BATCH}
            tokens = tensors.pop("tokens")
            if not tokens.dim() or not tokens.numel() or tokens.dtype.is_floating_point:
                refuse(self._index, f"has tokens of shape {list(tokens.shape)} and type {tokens.dtype}")
            ids, samples = tensors.pop("document_ids", None), tensors.pop("sample_ids", None)
            whole = batch(self._rank, self._count(fields, "micro_batch"), tokens, tensors)
            if ids is not None and ids.shape == tokens.shape:
                whole = replace(whole, document_ids=ids.reshape(whole.tokens.shape).long())
            if samples is not None and samples.shape == whole.tokens.shape[:1]:
                whole = replace(whole, sample_ids=samples.long())
            yield whole


_OF_BATCH = ("tokens", "labels", "loss_mask", "positions", "document_ids", "sample_ids")


def _is_corner(found: Any, dimensions: int) -> bool:
    return isinstance(found, list) and len(found) == dimensions and all(map(is_count, found))

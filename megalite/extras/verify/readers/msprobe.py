"""Traces of msprobe (MindStudio): step0/rank0/dump.json, and tensors in step0/rank0/dump_tensor_data.

Of a dump, the entries of modules are read (levels L0 and mix); those of single operations have no counterpart. In an
entry of backward, `input` is what comes in, the gradients of the module's results, and `output` the gradients of its
arguments. Calls of a module are numbered through the step: one that is recomputed has two numbers a micro-batch.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalite.conversion.torch_archive import read_torch_file
from megalite.errors import CheckpointError, DataError
from megalite.extras.verify.evidence import Evidence, Statistics, Whole
from megalite.extras.verify.readers.gathering import (
    FIRST_ARGUMENTS,
    Gathering,
    absent,
    as_statistic,
    batch,
    chosen_step,
    is_tokens,
    listed,
    plain_name,
    refuse,
)
from megalite.extras.verify.readers.stages import layers_before, layers_of, with_layers_before
from megalite.extras.verify.trace import Entry, RecordedBatch, Role, Trace
from megalite.restricted_pickle import StoredTensor
from megalite.small_files import MIB, MOST_AXES, is_count, open_regular, read_json, reason

FILE, DATA = "dump.json", "dump_tensor_data"
LARGEST = 256 * MIB
"""Largest size in bytes of a dump.json."""
MOST_MARKS = 8_000_000
"""Limit for the punctuation of a dump.json; a recorded tensor has about twenty-five."""
_STEP, _RANK = re.compile(r"step(\d{1,15})"), re.compile(r"(rank|proc)(\d{1,9})")
_NAME = re.compile(r"(?:Module|Cell)\.(.+)\.\w+\.(forward|backward|parameters_grad)\.(\d{1,9})")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_STATISTICS = {"Norm": "norm", "Max": "most", "Min": "least", "Mean": "mean"}
_SUMMED = 16 * torch.finfo(torch.float32).eps
"""Error of a norm or a mean that is summed in fp32, relative to the norm, or to the norm over the root of the size."""
_Info = Mapping[str, Any]


def owns(path: Path) -> bool:
    """Tell whether a folder is a dump, one of its steps, or one rank's of a step."""
    return bool(_dumps(path))


def read(path: Path, step: int | None) -> Trace:
    """Read the dumps of a step, which is the first one if `step` is None.

    Raises:
        ConfigurationError: the step is not there.
        CheckpointError, DataError: the files cannot be read, or have nothing to compare.
    """
    dumps = _dumps(path)
    step, dropped = (0, ()) if 0 in dumps else chosen_step(path, dumps, step)
    trace = Trace("", "msprobe's dump.json", step or None, dropped=dropped, gradients_of="modules")
    gathering = Gathering(path, trace)
    if step:
        gathering.note(f"msprobe counts the steps of a program from 0: its step{step - 1} is step {step} here")
    ranks: dict[int, _Rank] = {}
    for rank, folder in dumps[step].items():
        try:
            ranks[rank] = _Rank(rank, folder, gathering)
        except DataError as error:
            gathering.skip(error)
    stages = _stages(ranks)
    count = 1 + max(stages.values(), default=0)
    before = layers_before(
        {(stages[rank], chunk): layers for rank in stages for chunk, layers in ranks[rank].layers().items()}, count
    )
    trace.missing = absent(dumps[step], ranks)
    for rank, dump in ranks.items():
        trace.coordinates[rank] = {"pp": (stages[rank], count)} if count > 1 and rank in stages else {}
        for chunk, entry, dtype in dump.entries():
            if rank not in stages:
                gathering.leave_out("are of pipeline stages whose place is not known, because ranks are missing")
                continue
            gathering.add(replace(entry, name=with_layers_before(entry.name, before[stages[rank], chunk])), dtype)
        trace.batches += dump.batches
    return gathering.finish()


def _stages(ranks: Mapping[int, _Rank]) -> dict[int, int]:
    """Return the pipeline stage of each rank whose stage is known.

    Megatron-LM gives each stage as many ranks, one after the other. The first stage alone has the embedding.
    """
    there = range(len(ranks))
    first = [rank for rank, dump in ranks.items() if dump.has("embedding")]
    if not any(any(dump.layers().values()) for dump in ranks.values()) or len(first) in (0, len(ranks)):
        return dict.fromkeys(ranks, 0)
    if set(ranks) == set(there) and sorted(first) == list(range(len(first))) and len(ranks) % len(first) == 0:
        return {rank: rank // len(first) for rank in ranks}
    return dict.fromkeys(first, 0)


# ------------------------------------------------------------------------------------------------- files


def _dumps(path: Path) -> dict[int, dict[int, Path]]:
    """Return the folder of each rank by the number of the step, from 1; 0 if its name does not tell it."""
    if (path / FILE).is_file():
        rank = _RANK.fullmatch(path.name)
        return {_step(path.parent): {int(rank[2]) if rank and rank[1] == "rank" else 0: path}}
    if ranks := _ranks(path):
        return {_step(path): ranks}
    return {_step(each): ranks for each in listed(path) if _STEP.fullmatch(each.name) and (ranks := _ranks(each))}


def _step(folder: Path) -> int:
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) + 1 if match else 0


def _ranks(folder: Path) -> dict[int, Path]:
    """Return the folders of ranks. Where there are none, those of processes are numbered in their order."""
    kinds: dict[str, list[tuple[int, Path]]] = defaultdict(list)
    for each in listed(folder):
        match = _RANK.fullmatch(each.name)
        if match and (each / FILE).is_file():
            kinds[match[1]].append((int(match[2]), each))
    return dict(kinds["rank"]) or {number: each for number, (_, each) in enumerate(sorted(kinds["proc"]))}


# ------------------------------------------------------------------------------------------------- a rank's dump


@dataclass
class _Calls:
    """Calls of one module, by their numbers."""

    forward: dict[int, _Info] = field(default_factory=dict)
    backward: dict[int, _Info] = field(default_factory=dict)
    parameters_grad: dict[int, _Info] = field(default_factory=dict)


class _Rank:
    """Dump of one rank.

    Attributes:
        batches: the micro-batches, if the tokens themselves were recorded; complete once the entries were read.
    """

    def __init__(self, rank: int, folder: Path, gathering: Gathering) -> None:
        """Read dump.json. Raises DataError."""
        self._rank, self._folder, self._gathering = rank, folder, gathering
        self._file = folder / FILE
        self._names = {each.name for each in listed(folder / DATA)}
        self._modules: dict[tuple[int, str], _Calls] = defaultdict(_Calls)
        self.batches: list[RecordedBatch] = []
        found = list(self._calls())
        chunked = bool(found) and all(re.match(r"\d{1,2}\..", name) for name, *_ in found)  # in a list of models
        for name, kind, number, info in found:
            chunk, rest = name.split(".", 1) if chunked else ("0", name)
            getattr(self._modules[int(chunk), plain_name(rest)], kind)[number] = info

    def _calls(self) -> Iterator[tuple[str, str, int, _Info]]:
        """Yield the module, the kind and the number of each call, and what was recorded of it. Raises DataError."""
        try:
            content = read_json(self._file, largest=LARGEST, most_marks=MOST_MARKS, folder=self._gathering.path)
        except (OSError, ValueError) as error:
            raise DataError(f"{self._file} cannot be read: {reason(error)}") from error
        data = content.get("data") if isinstance(content, dict) else None
        if not isinstance(data, dict):
            raise DataError(f"{self._file} has no object `data`: it is no dump of msprobe")
        for key, info in data.items():
            self._gathering.visit()
            match = _NAME.fullmatch(key)
            if match is not None and isinstance(info, dict):
                yield match[1], match[2], int(match[3]), info
            else:
                self._gathering.leave_out("are of single operations, which have no counterpart")

    def has(self, module: str) -> bool:
        """Tell whether a module, or one within it, was recorded."""
        return any(name == module or name.startswith(f"{module}.") for _, name in self._modules)

    def layers(self) -> dict[int, int]:
        """Return the number of layers of each chunk."""
        chunks: dict[int, list[str]] = defaultdict(list)
        for chunk, name in self._modules:
            chunks[chunk].append(name)
        return {chunk: layers_of(names) for chunk, names in chunks.items()}

    def entries(self) -> Iterator[tuple[int, Entry, torch.dtype]]:
        """Yield the chunk, the entry and the type of each tensor. Names number the layers of the chunk."""
        counts = Counter(len(calls.backward) for calls in self._modules.values() if calls.backward)
        counts = counts or Counter(len(calls.forward) for calls in self._modules.values())
        usual = counts.most_common(1)[0][0] if counts else 0
        for (chunk, name), calls in self._modules.items():
            for entry, dtype in self._of_module(name, calls, usual):
                self._gathering.visit()
                yield chunk, entry, dtype

    def _of_module(self, name: str, calls: _Calls, usual: int) -> Iterator[tuple[Entry, torch.dtype]]:
        """Yield what was recorded of one module, which `usual` micro-batches went through."""
        forward = _originals(sorted(calls.forward), sorted(calls.backward), usual)
        backward = sorted(calls.backward) if len(calls.backward) == usual else []
        again = len(calls.forward) - len(forward) + len(calls.backward) - len(backward)
        if again:
            self._gathering.leave_out("are of calls that were recomputed, or are several in a micro-batch", again)
        for micro_batch, number in enumerate(forward):
            info, key = calls.forward[number], f"{name}.forward.{number}"
            arguments = list(_listed(info.get("input_args")))
            if not arguments and isinstance(named := info.get("input_kwargs"), dict):
                arguments = list(_listed([named[each] for each in FIRST_ARGUMENTS if each in named][:1]))
            for place, each in arguments:
                yield from self._entry(name, "input", each, key, place, micro_batch)
            for place, each in _listed(info.get("output")):
                yield from self._entry(name, "output", each, key, place, micro_batch)
        for micro_batch, number in enumerate(backward):
            info, key = calls.backward[number], f"{name}.backward.{number}"
            for place, each in _listed(info.get("input")):
                yield from self._entry(name, "output_gradient", each, key, place, micro_batch)
            for place, each in _listed(info.get("output")):
                yield from self._entry(name, "input_gradient", each, key, place, micro_batch)
        if forward and isinstance(values := calls.forward[forward[0]].get("parameters"), dict):
            for parameter, each in values.items():
                yield from self._entry(f"{name}.{parameter}", "parameter", each, f"{name}.forward.{forward[0]}")
        if calls.parameters_grad:  # they accumulate over the micro-batches
            last = max(calls.parameters_grad)
            for parameter, values in calls.parameters_grad[last].items():
                for _, each in _listed(values):
                    key = f"{name}.parameters_grad.{last}"
                    yield from self._entry(f"{name}.{parameter}", "gradient", each, key)

    def _entry(
        self, name: str, role: Role, info: object, key: str, number: int = 0, micro_batch: int = 0
    ) -> Iterator[tuple[Entry, torch.dtype]]:
        """Yield the entry of a tensor, if there are values of it."""
        if not isinstance(info, dict) or not _is_tensor(info):
            return
        shape, dtype = tuple(info["shape"]), _dtype(info["dtype"])
        file = info.get("data_name")
        statistics = _statistics(info, shape, dtype)
        source = f"{self._file}: {key}: {role} {number}"
        read: Callable[[], Evidence] = partial(_same, statistics)
        if isinstance(file, str) and file in self._names:  # a name of another folder is none of these
            whole = partial(_read_values, self._folder / DATA / file, self._folder, shape, dtype)
            if role == "input" and number == 0 and is_tokens(name, dtype, shape):
                self._add_batch(micro_batch, whole)
            read = whole
        elif dtype.is_floating_point and not statistics.values:
            return self._gathering.leave_out("have neither statistics nor a file in the folder")
        elif isinstance(file, str):
            self._gathering.note(f"{self._file} names files that are not in {DATA}: their statistics are used")
        yield Entry(self._rank, name, role, shape, source, read, number, micro_batch), dtype
        return None

    def _add_batch(self, micro_batch: int, whole: Callable[[], Whole]) -> None:
        try:
            self.batches.append(batch(self._rank, micro_batch, whole().values))
        except CheckpointError as error:
            self._gathering.skip(error)


def _originals(forward: Sequence[int], backward: Sequence[int], usual: int) -> Sequence[int]:
    """Return the numbers of calls that are no recomputation, one a micro-batch; empty if they cannot be told.

    Either the first call of a micro-batch, or the recomputed one, is that which backward goes through.
    """
    if len(forward) == usual:
        return forward
    if len(forward) == 2 * usual and len(backward) == usual:
        others = [number for number in forward if number not in set(backward)]
        found = backward if forward[0] == backward[0] else others
        return found if len(others) == usual else ()
    return ()


# ------------------------------------------------------------------------------------------------- a tensor


def _listed(values: object) -> Iterator[tuple[int, _Info]]:
    """Yield the place and the description of each tensor in a list."""
    return ((place, each) for place, each in enumerate(values if isinstance(values, list) else ()) if _is_tensor(each))


def _is_tensor(info: object) -> bool:
    if not isinstance(info, dict) or not isinstance(info.get("dtype"), str) or not isinstance(info.get("shape"), list):
        return False
    shape = info["shape"]
    return len(shape) <= MOST_AXES and all(map(is_count, shape)) and info["dtype"].rpartition(".")[2].lower() in _DTYPES


def _dtype(name: str) -> torch.dtype:
    return _DTYPES[name.rpartition(".")[2].lower()]


def _statistics(info: _Info, shape: tuple[int, ...], dtype: torch.dtype) -> Statistics:
    """Return the recorded statistics, and their errors: they are computed in the type of the tensor."""
    found = {_STATISTICS[key]: as_statistic(info.get(key)) for key in _STATISTICS}
    values = {name: value for name, value in found.items() if value is not None}
    if "norm" in values and not shape:
        values["norm"] = abs(values["norm"])  # of a scalar, it is the value itself
    errors = {}
    if dtype.is_floating_point:
        written = torch.finfo(dtype).eps / 2
        norm = values.get("norm", math.nan)
        size = max(math.prod(shape), 1)
        errors = {"norm": norm * (written + _SUMMED), "mean": norm * _SUMMED / math.sqrt(size)}
        errors["mean"] += abs(values.get("mean", 0.0)) * written
        if math.isnan(norm):
            values.pop("mean", None)
    return Statistics(shape, dtype, values, {name: errors[name] for name in errors if name in values})


def _same(statistics: Statistics) -> Statistics:
    return statistics


def _read_values(file: Path, folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Whole:
    """Read a tensor that dump.json has described. Raises CheckpointError."""
    if file.suffix == ".npy":
        values = _read_npy(file, folder)
    else:
        stored = read_torch_file(file, folder=folder)
        if not isinstance(stored, StoredTensor):
            refuse(file, "is no tensor")
        values = stored.read()
    if tuple(values.shape) != shape or (values.dtype != dtype and file.suffix != ".npy"):
        refuse(
            file, f"has shape {list(values.shape)} and type {values.dtype}, but {FILE} says {list(shape)} and {dtype}"
        )
    return Whole(values)


def _read_npy(file: Path, folder: Path) -> Tensor:
    """Read an array of numbers. Raises CheckpointError."""
    try:
        with open_regular(file, folder=folder) as stream:
            version = np.lib.format.read_magic(stream)
            if version > (2, 0):
                raise ValueError("a version of the format for names that are no ASCII")
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, by_columns, dtype = read(stream)
            size = math.prod(shape) * dtype.itemsize
            if dtype.kind not in "fiub" or min(shape, default=0) < 0 or len(shape) > MOST_AXES:
                raise ValueError("an array of something other than numbers")
            if os.fstat(stream.fileno()).st_size - stream.tell() != size:
                raise ValueError("its shape does not fit its size")
            array = np.frombuffer(bytearray(stream.read(size)), dtype).reshape(shape, order="F" if by_columns else "C")
            return torch.from_numpy(np.ascontiguousarray(array.astype(dtype.newbyteorder("="))))
    except Exception as error:  # numpy's reader of a damaged header can raise any
        raise CheckpointError(f"{file} cannot be read: {reason(error)}") from error

"""Traces of torchtitan's --profiler.dump_numerics: numerics/rank_0_activations.log.

The log has the statistics of the result of each operation, in the order of the operations, under the name of the module
that runs it: `[layers.0.attention.wo/op_0_mm]`. A module's output is the result of its last operation, if nothing but
changes of shape comes after it; so operations are read whose result is certain to be one, and of backward the two
products of a linear layer. Operations that only copy, cut or move values are not in the log.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path

import torch

from megalite.errors import DataError
from megalite.extras.verify.evidence import Evidence, Statistics
from megalite.extras.verify.readers.gathering import Gathering, absent, as_statistic, listed, plain_name
from megalite.extras.verify.trace import Entry, Role, Trace
from megalite.small_files import MIB, MOST_AXES, read_small_file, reason

LARGEST = 256 * MIB
"""Largest size in bytes of a log."""
_FILE = re.compile(r"rank_(\d{1,9})_activations\.log")
_FOLDER = "numerics"
_HEAD = re.compile(r"\[(?:(.+)/)?op_\d+_(\w+)\]\s*")
_SHAPE = re.compile(r"\s+Shape:\s+torch\.Size\(\[([\d, ]*)\]\), Dtype:\s+torch\.(\w+)\s*")
_LINE = re.compile(r"\s+(L1 norm|L2 norm|Min|Max|Mean|Phase):\s+(\S+)\s*")
_STATISTICS = {"L1 norm": "l1", "L2 norm": "norm", "Min": "least", "Max": "most", "Mean": "mean"}
_NOWHERE = "<none>"
_PRODUCTS = ("mm", "addmm", "bmm", "linear")
_RESULTS = (*_PRODUCTS, "embedding", "add", "mul", "native_layer_norm", "_fused_rms_norm")
"""Operations after which a module of torchtitan does nothing but change shapes, or round to its own type."""
_ATTENTION = re.compile(r"_scaled_dot_product_\w*attention(_for_cpu)?")
_COMMUNICATION = re.compile("all_?reduce|reduce_?scatter|all_?gather|all_?to_?all|broadcast|wait_tensor|redistribute")
_WRITTEN = 5e-7
"""Largest error of a number that is written with seven digits, relative to it."""


def owns(path: Path) -> bool:
    """Tell whether this is such a log, a folder with some, or the folder above `numerics`."""
    return bool(_files(path))


def read(path: Path, step: int | None) -> Trace:
    """Read the logs. They do not tell their step, so that any `step` is taken as theirs.

    Raises:
        DataError: no log can be read, or has anything to compare.
    """
    files = _files(path)
    trace = Trace("torchtitan", "torchtitan's --profiler.dump_numerics", step, gradients_of="modules")
    gathering = Gathering(path, trace)
    gathering.note("the logs have statistics of operations: compared are those that are certain to be of a module")
    for rank, file in files.items():
        try:
            operations = list(_operations(file, gathering))
        except DataError as error:
            gathering.skip(error)
        else:
            trace.coordinates[rank] = {}
            for name, role, micro_batch, operation in _of_modules(operations):
                read = partial(_same, operation.statistics)
                source = f"{file}: {operation.key}"
                shape = operation.statistics.shape
                entry = Entry(rank, name, role, shape, source, read, 0, micro_batch)
                gathering.add(entry, operation.statistics.dtype)
    trace.missing = absent(files, trace.coordinates)
    return gathering.finish()


def _files(path: Path) -> dict[int, Path]:
    """Return the logs by their ranks."""
    if match := _FILE.fullmatch(path.name):
        return {int(match[1]): path} if path.is_file() else {}
    for folder in (path, path / _FOLDER):
        if found := {int(match[1]): each for each in listed(folder) if (match := _FILE.fullmatch(each.name))}:
            return found
    return {}


# ------------------------------------------------------------------------------------------------- the log


@dataclass(frozen=True)
class _Operation:
    """Operation with a result: its key, the plain name of its module, its own name, whether it is of backward."""

    key: str
    module: str
    name: str
    backward: bool
    statistics: Statistics


@dataclass
class _Block:
    """Lines of one operation."""

    head: re.Match[str]
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    values: dict[str, float] = field(default_factory=dict)
    backward: bool = False

    def add(self, line: str) -> None:
        """Take a line; those that are not of interest are passed over. Raises ValueError."""
        if match := _SHAPE.fullmatch(line):
            dtype = getattr(torch, match[2], None)
            sizes = match[1].replace(" ", "").split(",") if match[1].strip() else []
            if len(sizes) > MOST_AXES or not isinstance(dtype, torch.dtype) or not all(sizes):
                raise ValueError("a shape or a type that no tensor has")
            self.shape, self.dtype = tuple(map(int, sizes)), dtype
        elif match := _LINE.fullmatch(line):
            if match[1] == "Phase":
                self.backward = match[2] == "backward"
            else:
                value = as_statistic(_number(match[2]))
                if value is None:
                    raise ValueError(f"{match[1]} is no number")
                self.values[_STATISTICS[match[1]]] = value

    def operation(self) -> _Operation | None:
        """Return the operation; None if it has no result, as one in place."""
        if self.shape is None or self.dtype is None:
            return None
        errors = {name: abs(value) * _WRITTEN for name, value in self.values.items()}
        statistics = Statistics(self.shape, self.dtype, self.values, errors)
        module = re.sub(r"^[A-Z]\w*\.", "", plain_name(self.head[1] or _NOWHERE))  # older logs name the model's class
        return _Operation(self.head[0].strip(), module, self.head[2], self.backward, statistics)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _operations(file: Path, gathering: Gathering) -> Iterator[_Operation]:
    """Yield the operations of a log that have results. Raises DataError."""
    try:
        content = read_small_file(file, largest=LARGEST, folder=gathering.path if gathering.path.is_dir() else None)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {reason(error)}") from error
    block: _Block | None = None
    for number, raw in enumerate(io.BytesIO(content), 1):
        line = raw.decode(errors="replace")
        head = _HEAD.fullmatch(line)
        try:
            if head is None and block is not None:
                block.add(line)
        except ValueError as error:
            raise DataError(
                f"{file}, line {number}: {reason(error)}: it is damaged, or no log of torchtitan"
            ) from error
        if head is not None:
            if block is not None and (operation := block.operation()):
                yield operation
            gathering.visit()
            block = _Block(head)
    if block is None:
        raise DataError(f"{file} has no operation: it is empty, or no log of torchtitan")
    if operation := block.operation():
        yield operation


# ------------------------------------------------------------------------------------------------- modules


def _of_modules(operations: Sequence[_Operation]) -> Iterator[tuple[str, Role, int, _Operation]]:
    """Yield the name of a module, the role, the micro-batch and the operation of each result that is a module's.

    A micro-batch begins where the first module of all is entered again.
    """
    named = [each for each in operations if each.module != _NOWHERE]
    forward = list(_passes([each for each in named if not each.backward]))
    for micro_batch, those in enumerate(forward):
        for operation in _last(those):
            if operation.name in _RESULTS or _ATTENTION.fullmatch(operation.name):
                yield operation.module, "output", micro_batch, operation
    backward: dict[str, list[_Operation]] = defaultdict(list)
    for operation in named:
        if operation.backward:
            backward[operation.module].append(operation)
    widths = {each.module: each.statistics.shape for those in forward for each in those if each.name in _PRODUCTS}
    for module, shape in widths.items():
        pairs = list(_pairs(backward[module], shape))
        if len(pairs) == len(forward):
            for micro_batch, (of_weight, of_input) in enumerate(pairs):
                yield module, "input_gradient", micro_batch, of_input
                if len(forward) == 1:
                    yield f"{module}.weight", "gradient", 0, of_weight


def _passes(operations: Sequence[_Operation]) -> Iterator[list[_Operation]]:
    """Yield the operations of each micro-batch's forward, which begins in the first module that has none within it."""
    outer = {parent for operation in operations for parent in _parents(operation.module)}
    first = next((operation.module for operation in operations if operation.module not in outer), "")
    passed: list[_Operation] = []
    for operation in operations:
        if operation.module == first and any(each.module == first for each in passed) and passed[-1].module != first:
            yield passed
            passed = []
        passed.append(operation)
    if passed:
        yield passed


def _parents(module: str) -> Iterator[str]:
    """Yield the modules that contain one."""
    while module := module.rpartition(".")[0]:
        yield module


def _last(operations: Sequence[_Operation]) -> Iterable[_Operation]:
    """Return the last operation of each module that is its own, and not of a module within it.

    One that a communication follows is left out: hooks of a module communicate after it has returned.
    """
    found: dict[str, _Operation] = {}
    for operation, following in zip_longest(operations, operations[1:]):
        for parent in _parents(operation.module):
            found.pop(parent, None)
        found.pop(operation.module, None)
        if following is None or not _COMMUNICATION.search(following.name):
            found[operation.module] = operation
    return found.values()


def _pairs(operations: Sequence[_Operation], output: tuple[int, ...]) -> Iterator[tuple[_Operation, _Operation]]:
    """Yield the products of a linear layer's backward: the gradient of its weight, and after it that of its input.

    `output`: shape of the output, [tokens, features]. Where the shapes of the two cannot be told apart, there is none.
    """
    for of_weight, of_input in pairwise(operations):
        one, two = of_weight.statistics.shape, of_input.statistics.shape
        if of_weight.name in _PRODUCTS and of_input.name in _PRODUCTS and len(output) == len(one) == len(two) == 2:
            tokens, features = output
            if tokens != features and two[0] == tokens and one in ((features, two[1]), (two[1], features)):
                yield of_weight, of_input


def _same(statistics: Statistics) -> Evidence:
    return statistics

"""Parts that all readers of traces share: a trace in the making, plain names, a choice of a step, files of tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from megalite.conversion.torch_archive import read_torch_file
from megalite.errors import CheckpointError, ConfigurationError, DataError
from megalite.extras.verify.evidence import Whole
from megalite.extras.verify.trace import Entry, RecordedBatch, Trace
from megalite.restricted_pickle import StoredTensor

MOST_VALUES = 1_000_000
"""Largest number of recorded values of a step; each takes about a kilobyte of memory before it is read."""
MOST_OPEN_FILES = 128
"""Tensor files that are kept open at a time: of more, the one whose last use is the longest ago is read again."""
MOST_RANKS = 100_000
"""Largest number of ranks that are expected by the numbers in a trace."""
_SHOWN = 20
"""Largest number of lines on files that cannot be read."""
FIRST_ARGUMENTS = ("hidden_states", "input", "input_", "x", "input_ids")
"""Names of keyword arguments that are what a module computes on, if it is called without positional ones."""
_EMBEDDINGS = ("embedding", "word_embeddings", "tok_embeddings", "embed_tokens", "wte", "embed_in")
"""Last words in the names of modules whose input is the tokens."""
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_OUTSIDE = re.compile(r"module|model_chunk\d+")
_PROGRAMS = {
    "megatron": re.compile(r"decoder\.layers\.\d+\b|embedding\.word_embeddings\b"),
    "huggingface": re.compile(r"(model\.layers|transformer\.h|gpt_neox\.layers)\.\d+\b"),
    "torchtitan": re.compile(r"layers\.\d+\.(attention_norm|ffn_norm|feed_forward)\b"),
}


@dataclass
class Gathering:
    """Trace in the making, with the reasons why recorded tensors are left out.

    Attributes:
        path: what the user has named.
        trace: the trace; only `add` and `finish` may change its entries and notes.
    """

    path: Path
    trace: Trace
    _left_out: Counter[str] = field(default_factory=Counter)
    _errors: list[CheckpointError | DataError] = field(default_factory=list)
    _visited: int = 0

    def visit(self) -> None:
        """Count a recorded value, of any kind. Raises DataError if there are more than `MOST_VALUES`."""
        self._visited += 1
        if self._visited > MOST_VALUES:
            raise DataError(f"{self.path} has more than {MOST_VALUES:,} values of a step: record fewer modules")

    def add(self, entry: Entry, dtype: torch.dtype) -> None:
        """Take an entry, unless it has no elements or no floating-point ones."""
        if dtype.is_floating_point and 0 not in entry.shape:
            self.trace.entries.append(entry)
        else:
            self.leave_out("have no floating-point elements")

    def leave_out(self, reason: str, count: int = 1) -> None:
        """Count recorded values that are not used. `reason`: the end of a sentence about them."""
        self._left_out[reason] += count

    def note(self, line: str) -> None:
        """Say something once."""
        if line not in self.trace.notes:
            self.trace.notes.append(line)

    def skip(self, error: CheckpointError | DataError) -> None:
        """Go on without a file that cannot be read."""
        self._errors.append(error)

    def finish(self) -> Trace:
        """Return the trace.

        Raises:
            CheckpointError, DataError: no file can be read.
            DataError: there is nothing to compare.
        """
        trace = self.trace
        if not trace.entries and not trace.batches:
            if self._errors:
                raise self._errors[0]
            reasons = "".join(f"; {count} {reason}" for reason, count in self._left_out.items())
            raise DataError(f"{self.path} has no tensor that can be compared{reasons}")
        trace.notes += [f"left out: {error}" for error in self._errors[:_SHOWN]]
        if len(self._errors) > _SHOWN:
            trace.notes.append(f"left out: {len(self._errors) - _SHOWN} more files that cannot be read")
        trace.notes += [f"{count} recorded values {reason}" for reason, count in self._left_out.items()]
        if not trace.program:
            trace.program = _program(entry.name for entry in trace.entries)
        return trace


def plain_name(name: str) -> str:
    """Return the name of a module or a parameter without the names of wrappers around it or within it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while parts and _OUTSIDE.fullmatch(parts[0]):
        del parts[0]
    return ".".join(parts)


def _program(names: Iterable[str]) -> str:
    """Return the program whose names these are; an empty text if they are none's that is known."""
    for name in names:
        for program, pattern in _PROGRAMS.items():
            if pattern.match(name):
                return program
    return ""


def chosen_step(path: Path, steps: Iterable[int], asked: int | None) -> tuple[int, tuple[int, ...]]:
    """Return the step to read, which is the first one unless another is asked for, and the others.

    Raises ConfigurationError if it is not there.
    """
    there = sorted(set(steps))
    step = there[0] if asked is None else asked
    if step not in there:
        few = ", ".join(map(str, there[:_SHOWN])) + (", ..." if len(there) > _SHOWN else "")
        raise ConfigurationError(f"step {step} is not in {path}, which has {few}: ask for one of these")
    return step, tuple(each for each in there if each != step)


def absent(named: Iterable[int], there: Container[int]) -> tuple[int, ...]:
    """Return the ranks up to the last one that is named that are not there."""
    return tuple(rank for rank in range(min(max(named, default=-1) + 1, MOST_RANKS)) if rank not in there)


def listed(folder: Path) -> list[Path]:
    """Return what is in a folder, by name; nothing if it is none, or may not be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


class TensorFiles:
    """Files of `torch.save` below a folder. The last ones that were used are kept open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.contents = lru_cache(maxsize=MOST_OPEN_FILES)(self._contents)

    def _contents(self, path: Path) -> Any:
        """Return what a file has. Raises CheckpointError."""
        return read_torch_file(path, folder=self._folder)

    def whole(self, path: Path, *keys: str) -> Whole:
        """Return the tensor under a key, below it a further one, and so on. Raises CheckpointError."""
        found = self.contents(path)
        for key in keys:
            if not isinstance(found, dict) or key not in found:
                raise CheckpointError(f"{path} has no {key}, which it had before: it has been changed")
            found = found[key]
        if not isinstance(found, StoredTensor):
            refuse(path, "has something else where a tensor was expected")
        return Whole(found.read())


def refuse(path: Path, what: str) -> NoReturn:
    """Raise the CheckpointError for a file that is not what its name says."""
    raise CheckpointError(f"{path} {what}: it is damaged, or not of the program that writes such names")


def as_statistic(value: object) -> float | None:
    """Return a statistic of a file; None if there is none. NaN and infinities may be written as text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and re.fullmatch(r"[+-]?(nan|inf|infinity)", value.strip(), re.IGNORECASE):
        return float(value)
    return None


def is_tokens(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Tell whether the first input of a module is a micro-batch's tokens."""
    is_batch = len(shape) in (1, 2) and 0 not in shape
    return is_batch and name.rpartition(".")[2] in _EMBEDDINGS and dtype in (torch.int64, torch.int32)


def batch(rank: int, micro_batch: int, tokens: Tensor, others: Mapping[str, Tensor] | None = None) -> RecordedBatch:
    """Return a micro-batch, [batch, tokens], from tensors of that shape, or of one sample without the first dimension.

    `others`: labels, loss_mask and positions; those of another shape are left out.
    """
    shape = tokens.shape
    rows = {name: each.reshape(-1, shape[-1]) for name, each in (others or {}).items() if each.shape == shape}
    labels, positions = rows.get("labels"), rows.get("positions")
    return RecordedBatch(
        rank,
        micro_batch,
        tokens.reshape(-1, shape[-1]).long(),
        None if labels is None else labels.long(),
        rows.get("loss_mask"),
        None if positions is None else positions.long(),
    )

"""Metrics of a run: one JSON object per line in metrics.jsonl, from which sinks get them, too.

Floats are written at full precision. JSON has no non-finite floats: they are written as the strings "NaN", "Infinity"
and "-Infinity", as in protobuf's JSON mapping, and `float()` reads them back. `null` means that a figure does not
exist, such as the model FLOPs utilization on a CPU. `wall_time` is when a line was written, in seconds since 1970: what
lies between two lines is all that the run spends on a step, also outside of its `iteration_time_s`.
"""

from __future__ import annotations

import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from io import StringIO, TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, Self, TextIO, cast

from megalite.atomic_files import open_itself
from megalite.errors import CheckpointError
from megalite.process.place import numbered
from megalite.small_files import open_regular, reason
from megalite.storage import AnyPath, ObjectPath

Value = float | int | bool | str | None


@dataclass(frozen=True)
class Metrics:
    """One record. Samples and tokens are counted over all ranks since the start of the run."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int | None
    """Number of consumed tokens; None if samples do not consist of tokens."""
    extra: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    """Additional figures, written under their own names."""

    def record(self) -> dict[str, Value]:
        """Return the figures by the names under which they are written."""
        figures: dict[str, Value] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            figures |= value if isinstance(value, Mapping) else {entry.name: value}
        extra = {name: figures.pop(name) for name in self.extra}
        if self.consumed_tokens is None:
            del figures["consumed_tokens"]
        return figures | extra


@dataclass(frozen=True)
class StepMetrics(Metrics):
    """One training step."""

    losses: Mapping[str, float]
    """The loss, under its name."""
    grad_norm: float
    learning_rate: float
    loss_scale: float
    skipped: bool
    iteration_time_s: float
    throughput: Mapping[str, float | None]
    """Figures of the speed, of which the first one is items per second."""
    peak_memory_bytes: int
    bytes_sent: int
    """Bytes that rank 0 has sent in the step to other ranks, if each collective takes a ring."""

    @property
    def loss(self) -> float:
        return next(iter(self.losses.values()))


@dataclass(frozen=True)
class ValidationMetrics(Metrics):
    """One evaluation, after the step `iteration`."""

    valid_loss: float


@dataclass(frozen=True)
class TestMetrics(Metrics):
    """The evaluation on test data, after the last step."""

    test_loss: float


@dataclass(frozen=True)
class SampleMetrics(Metrics):
    """Text that the network has written after the step `iteration`."""

    sample: str


_KINDS = StepMetrics, ValidationMetrics, TestMetrics, SampleMetrics
_LONGEST_LINE = 2**24  # characters: a damaged file may be one line
THROUGHPUT = ("tokens_per_second", "tokens_per_second_per_device", "model_tflops_per_device", "mfu")
"""Figures of a language model's speed."""
LARGEST_LOGIT = "max_attention_logit"
"""Figure of the largest logit of attention in a step."""
ON_REQUEST = {
    *(*THROUGHPUT, "samples_per_second", "samples_per_second_per_device"),
    *("decoupled_learning_rate", "weight_decay", "params_norm", "num_zeros_in_grad", "world_size"),
    *("staleness", "dropped_gradients", "left_out_samples", "host_memory_bytes", "memory_copy_s"),
    *("kept_micro_batches", "predicted_memory_bytes"),
    *("memory_bytes", "memory_growth_bytes", "memory_beyond_prediction_bytes"),
    *("max_expert_load", "min_expert_load", "dropped_assignments", LARGEST_LOGIT),
    *("wait_s", "communication_share", "scaling_efficiency"),
    *("data_time_s", "save_time_s", "evaluation_time_s", "start_time_s"),
}
"""Figures that flags add to the record of a step, and those that only some records have."""


def is_figure(name: str) -> bool:
    """Tell whether records have a figure of this name, or of the name before its slash, as in "grad_norm/all"."""
    return name.split("/")[0] in ON_REQUEST.union(*({own.name for own in fields(kind)} for kind in _KINDS))


@dataclass(frozen=True)
class Recorded:
    """Records that the metrics file of a resumed run must have, unless it was changed."""

    last: int
    """Step that the run resumes from."""
    from_first: bool
    """True: all steps up to `last` are there. False: only from some step on, since the run began in another directory.
    """
    evaluated: bool
    """True: the validation loss after step `last` is there, too."""

    def lacks(self, steps: Set[int], evaluations: Set[int]) -> list[str]:
        """Return, as text, which of these records are missing."""
        first = 1 if self.from_first else min(steps, default=self.last)
        missing = [step for step in range(first, self.last + 1) if step not in steps]
        return [
            *([numbered("step", missing)] if missing else []),
            *([f"the evaluation after step {self.last}"] if self.evaluated and self.last not in evaluations else []),
        ]


class StepWriter(ABC):
    """Writer of lines about steps, a context manager that closes it. `close` writes and publishes what is left.

    An object in an object store cannot be appended to: `publish` and `close` replace it with all lines.
    """

    _published: Published | None

    @abstractmethod
    def close(self) -> None:
        """Write and publish what is left. Raises CheckpointError if that fails."""

    def publish(self) -> None:
        """Publish all lines so far to the store, before a checkpoint: after a resume no line from before it may be
        missing.

        If this fails, the next call tries again, and `close` is the last try.
        """
        if self._published is not None:
            with suppress(OSError):
                self._published.publish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with suppress(CheckpointError) if kind is not None else nullcontext():  # the first error is the one to report
            self.close()


class Sink(Protocol):
    """Further destination of records, but of those of texts."""

    def write(self, record: Mapping[str, Value]) -> None:
        """Take a record. Raises OSError if not all is written: the rest is written before the next record."""

    def close(self) -> None:
        """Write what is left. Raises OSError if that fails."""


class MetricsWriter(StepWriter):
    """Writer that appends records to `path` without a delay, and gives them to sinks. One rank writes.

    `note` is a message if the file is damaged or lacks records.

    Args:
        path: metrics file; None: no file.
        resume_iteration: records after this step are removed first: an earlier attempt wrote them.
        evaluation_left: the evaluation after `resume_iteration` is removed, too.
        recorded: records that the file must have.
        open_sinks: returns the sinks; called after the file is opened.

    Raises:
        CheckpointError: the files cannot be written.
    """

    def __init__(
        self,
        path: AnyPath | None = None,
        resume_iteration: int = 0,
        *,
        evaluation_left: bool = False,
        recorded: Recorded | None = None,
        open_sinks: Callable[[], Sequence[Sink]] = tuple,
    ) -> None:
        self.note: str | None = None
        self._lines: _Lines | None = None
        self._sinks: Sequence[Sink] = ()
        self._fails = False
        self._published = Published(path) if isinstance(path, ObjectPath) else None
        self._places = str(path or "TensorBoard's files")
        with self._writing():
            file = path if self._published is None else self._published.fetch()
            if isinstance(file, Path):
                file.parent.mkdir(parents=True, exist_ok=True)
                wrong = truncate_after(file, resume_iteration, evaluation_left=evaluation_left, recorded=recorded)
                if wrong:
                    self.note = (
                        f"WARNING: {path} {' and '.join(wrong)}: it was changed, or could not be written. "
                        "The run continues, and keeps what can be read of it"
                    )
                self._lines = _Lines(file)
        self._sinks = open_sinks()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            why = reason(error)
            raise CheckpointError(
                f"writing metrics to {self._places} failed: {why}. Free space, or choose another --save, "
                "--metrics-path or --tensorboard-dir"
            ) from error

    def write(self, metrics: Metrics) -> str | None:
        """Write a record. If the disk is full, keep the rest in memory and write it in the next call, or in `close`.

        A full disk often has space again later, for example after a failed save is removed. Returns a warning at the
        first failure in a row.
        """
        record = metrics.record()
        failed, self._fails = self._fails, False
        told = None
        for destination in (self._lines, *(() if isinstance(metrics, SampleMetrics) else self._sinks)):
            try:
                if destination is not None:
                    destination.write(record)
            except OSError as error:
                self._fails = True
                told = (
                    f"WARNING: writing metrics to {self._places} failed: {error.strerror}. They will be written later"
                )
        return None if failed else told

    def close(self) -> None:
        with self._writing():
            if self._lines is not None:
                self._lines.close()
            if self._published is not None:
                self._published.publish()
            for sink in self._sinks:
                sink.close()


class Growing:
    """File that is appended to, without a buffer, which would lose or tear data for which there is no space."""

    def __init__(self, path: Path) -> None:
        self._file = open_itself(path, "ab", buffering=0)
        self._waiting = b""

    def append(self, data: bytes) -> None:
        """Append data. Raises OSError if not all is written: the rest is written before the next data."""
        self._waiting += data
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def close(self) -> None:
        """Write the rest and close. Raises OSError if there is still no space."""
        with self._file:
            self.append(b"")


class _Lines(Growing):
    """The JSON lines of metrics.jsonl."""

    def write(self, record: Mapping[str, Value]) -> None:
        """Append a record. Raises OSError if not all is written: the rest is written before the next record."""
        line = {name: _encode(value) for name, value in record.items()} | {"wall_time": time.time()}
        self.append(json.dumps(line).encode() + b"\n")


class Published:
    """Local copy of an object in an object store: it is fetched, appended to, and published again."""

    def __init__(self, path: ObjectPath) -> None:
        self.path = path
        self._folder = TemporaryDirectory(prefix="megalite-")
        self.file = Path(self._folder.name) / path.name

    def fetch(self) -> Path:
        """Return the local file. Raises OSError."""
        with suppress(FileNotFoundError):
            self.file.write_bytes(self.path.read_bytes())
        return self.file

    def publish(self) -> None:
        """Replace the object by the file. Raises OSError."""
        self.path.put(self.file.read_bytes())


def has_test_loss(path: AnyPath, iteration: int) -> bool:
    """Tell whether the evaluation on test data after the step `iteration` is recorded, in a file that can be read."""
    with suppress(OSError, ValueError):
        return any("test_loss" in record and record["iteration"] == iteration for record in read_records(path))
    return False


def read_records(path: AnyPath) -> Iterator[dict[str, Value]]:
    """Yield the records of a metrics file, without damaged lines.

    Raises OSError, and ValueError if it is not a regular file.
    """
    with open_lines(path) as lines:
        yield from (record for _, record in parsed_lines(lines, "iteration") if record is not None)


def truncate_after(
    path: Path, iteration: int, *, evaluation_left: bool = False, recorded: Recorded | None = None
) -> list[str]:
    """Remove damaged lines and the records of later iterations; with `evaluation_left` also this one's evaluation.

    The file is replaced atomically. Returns the problems of the file as text: damaged lines, missing `recorded` ones.
    """
    steps: set[int] = set()
    evaluations: set[int] = set()

    def is_kept(record: Mapping[str, Value]) -> bool:
        number = cast(int, record["iteration"])
        if number >= (iteration if evaluation_left and "valid_loss" in record else iteration + 1):
            return False
        (evaluations if "valid_loss" in record else steps if "grad_norm" in record else set()).add(number)
        return True

    damaged = cut(path, is_kept)
    lacking = [] if recorded is None else recorded.lacks(steps, evaluations)
    return [
        *([f"lacks {' and '.join(lacking)}"] if lacking else []),
        *([f"has {damaged} damaged line{'s' if damaged > 1 else ''}"] if damaged else []),
    ]


def cut(path: Path, is_kept: Callable[[Mapping[str, Value]], bool], step: str = "iteration") -> int:
    """Remove damaged lines of a file, and those of records that are not kept. The file is replaced atomically.

    `step`: the key of a record's step, without which it is damaged. Returns the number of damaged lines.
    """
    damaged = 0
    if path.exists():
        aside = path.with_name(path.name + ".tmp")
        with open_lines(path) as lines, open_itself(aside, "w", encoding="utf-8") as kept:
            for line, record in parsed_lines(lines, step):
                if record is None:
                    damaged += 1
                elif is_kept(record):
                    kept.write(line)
            kept.flush()
            os.fsync(kept.fileno())
        os.replace(aside, path)
    return damaged


def open_lines(path: AnyPath) -> TextIO:
    """Open a file of records. Raises OSError, and ValueError if it is not a regular file."""
    if isinstance(path, ObjectPath):
        return StringIO(path.read_bytes().decode(errors="replace"))
    return TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace")


def parsed_lines(lines: TextIO, step: str) -> Iterator[tuple[str, dict[str, Value] | None]]:
    """Yield each line with its record, or None if it is damaged. One that is too long is several damaged lines."""
    for line in iter(lambda: lines.readline(_LONGEST_LINE), ""):
        try:
            record = json.loads(line)
            whole = type(record[step]) is int
        except (ValueError, TypeError, KeyError, RecursionError):
            whole = False
        yield line, record if whole else None


def _encode(value: Value) -> Value:
    """Return a value as strict JSON has it: NaN and infinities are strings."""
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value

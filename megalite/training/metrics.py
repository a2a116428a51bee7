"""What a run writes down: one JSON object a line in metrics.jsonl, and the same numbers for TensorBoard.

Floats are written at full precision. JSON has no word for a float that is not finite: such a value is the string
"NaN", "Infinity" or "-Infinity", as in protobuf's JSON mapping, which `float()` reads back. `null` says that a figure
does not exist, as the model FLOPs utilization on a CPU.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING

from megalite.checkpoint import AnyPath, ObjectPath
from megalite.errors import CheckpointError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Value = float | int | bool | str | None


@dataclass(frozen=True)
class StepMetrics:
    """One training step. Samples and tokens are counted over all ranks since the start of the run."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float
    skipped: bool
    iteration_time_s: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    model_tflops_per_device: float
    mfu: float | None
    peak_memory_bytes: int
    extra: Mapping[str, float] = field(default_factory=dict)  # further figures, written under their own names


@dataclass(frozen=True)
class ValidationMetrics:
    """One evaluation, after the step `iteration`."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    valid_loss: float
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TestMetrics:
    """The evaluation on test data, after the last step."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    test_loss: float
    extra: Mapping[str, float] = field(default_factory=dict)


class MetricsWriter:
    """Appends records to `path` (each line flushed) and to TensorBoard; a destination that is None is left out.

    An object on an object store cannot be appended to: it is written anew, with all lines, by `publish` and at the end.
    A run that resumes after iteration `resume_iteration` first cuts off what an earlier attempt wrote beyond it, so
    that the file tells one trajectory. One rank writes; the others have none of these, or one without destinations.
    Raises CheckpointError where the run directory cannot be written.
    """

    def __init__(
        self, path: AnyPath | None = None, tensorboard_directory: Path | None = None, resume_iteration: int = 0
    ) -> None:
        self._file, self._tensorboard = None, None
        self._published = Published(path) if isinstance(path, ObjectPath) else None
        self._places = " and ".join(str(place) for place in (path, tensorboard_directory) if place is not None)
        with self._writing():
            file = path if self._published is None else self._published.fetch()
            if isinstance(file, Path):
                file.parent.mkdir(parents=True, exist_ok=True)
                truncate_after(file, resume_iteration)
                self._file = file.open("a", encoding="utf-8")
            if tensorboard_directory is not None:
                self._tensorboard = _tensorboard_writer(tensorboard_directory, resume_iteration)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"writing metrics to {self._places} failed: {error.strerror}. Free space, or choose another --save, "
                "--metrics-path or --tensorboard-dir"
            ) from error

    def write(self, metrics: StepMetrics | ValidationMetrics | TestMetrics) -> None:
        record = asdict(metrics)
        record |= record.pop("extra")
        with self._writing():
            if self._file is not None:
                self._file.write(json.dumps({name: _encode(value) for name, value in record.items()}) + "\n")
                self._file.flush()
            if self._tensorboard is not None:
                for name, value in record.items():
                    if name != "iteration" and value is not None:
                        self._tensorboard.add_scalar(name, value, record["iteration"])

    def publish(self) -> None:
        """Let a store have all lines so far, before a checkpoint: on resume no line that came before it may lack.

        Where it fails the next call has another try, and `close` the last.
        """
        if self._published is not None:
            with suppress(OSError):
                self._published.publish()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(CheckpointError) if kind is not None else nullcontext():  # the first error is the one to tell
            self.close()

    def close(self) -> None:
        with self._writing():
            if self._file is not None:
                self._file.close()
            if self._published is not None:
                self._published.publish()
            if self._tensorboard is not None:
                self._tensorboard.close()


class Published:
    """A file that stands for an object: it begins as the object is, and grows here until it is published."""

    def __init__(self, path: ObjectPath) -> None:
        self.path = path
        self._folder = TemporaryDirectory(prefix="megalite-")
        self.file = Path(self._folder.name) / path.name

    def fetch(self) -> Path:
        """The file. Raises OSError."""
        with suppress(FileNotFoundError):
            self.file.write_bytes(self.path.read_bytes())
        return self.file

    def publish(self) -> None:
        """Raises OSError."""
        self.path.put(self.file.read_bytes())


def read_metrics(path: Path) -> list[dict[str, Value]]:
    """All records of a metrics file, floats that are not finite as floats again; a torn last line is left out."""
    with path.open(encoding="utf-8") as lines:
        return [record for _, record in _records(lines)]


def truncate_after(path: Path, iteration: int) -> None:
    """Drop the records of later iterations, and a line that a crash tore, if there are any. A crash in here leaves
    the file either as it was or as it should be."""
    if not path.exists():
        return
    aside = path.with_name(path.name + ".tmp")
    with path.open(encoding="utf-8") as lines, aside.open("w", encoding="utf-8") as kept:
        for line, record in _records(lines):
            if record["iteration"] <= iteration:  # type: ignore[operator]
                kept.write(line)
        kept.flush()
        os.fsync(kept.fileno())
    os.replace(aside, path)


def _records(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Value]]]:
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        yield line, {name: _decode(value) for name, value in record.items()}


def _encode(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _decode(value: Value) -> Value:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _tensorboard_writer(directory: Path, resume_iteration: int) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and most ranks never need it

    # Events beyond the loaded iteration come from an attempt that is being run again.
    return SummaryWriter(str(directory), purge_step=resume_iteration + 1 if resume_iteration else None)

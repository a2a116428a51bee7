"""TensorBoard's event files. (Its own writer stops permanently at the first write that fails.)"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import cast

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from megalite.extras.sinks.curves import Curves, losses, over_samples
from megalite.training.metrics import Growing, Value

SAMPLES = "samples"
"""Folder below that of the events, a TensorBoard run of its own, of the curves over consumed samples: a resume hides
what lies after a step, and in one folder that would hide nearly all whose steps are samples."""


class TensorBoardEvents:
    """Sink that writes TensorBoard's event files into `directory`.

    Args:
        configuration: the configuration of the run as YAML, shown as text.
        iteration: step that the run resumes from; later events of an earlier attempt are superseded.
        consumed_samples: samples until then.
        step_interval: number of training steps per step that is written.

    Raises:
        OSError: the files cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        configuration: str,
        curves: Curves,
        *,
        iteration: int = 0,
        consumed_samples: int = 0,
        step_interval: int = 1,
    ) -> None:
        self._curves, self._step_interval = curves, step_interval
        self._over_steps = _EventFile(directory, iteration)
        self._over_samples = _EventFile(directory / SAMPLES, consumed_samples)
        self._over_steps.add(Event(step=iteration, summary=Summary(value=[_text("configuration", configuration)])))

    def write(self, record: Mapping[str, Value]) -> None:
        """Append a record. Raises OSError if not all is written: the rest is written before the next record."""
        points = self._curves.of(record)
        iteration, consumed = cast(int, record["iteration"]), cast(int, record["consumed_samples"])
        if "grad_norm" in record and iteration % self._step_interval:
            return
        try:
            self._over_steps.add_points(iteration, losses(points) | points)
        finally:
            self._over_samples.add_points(consumed, over_samples(points))

    def close(self) -> None:
        """Write the rest. Raises OSError if there is still no space."""
        try:
            self._over_samples.close()
        finally:
            self._over_steps.close()


class _EventFile(Growing):
    """One event file. Events of an earlier attempt that come after `position` are superseded."""

    def __init__(self, directory: Path, position: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(directory / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}")
        self.add(Event(file_version="brain.Event:2"))
        if position:  # later events come from an earlier attempt, and these steps are run again
            self.add(Event(step=position + 1, session_log=SessionLog(status=SessionLog.START)))

    def add_points(self, step: int, points: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in points.items()]
        self.add(Event(step=step, summary=Summary(value=values)))

    def add(self, event: Event) -> None:
        """Append an event. Raises OSError if not all is written: the rest is written before the next event."""
        event.wall_time = time.time()
        framed = BytesIO()
        RecordWriter(framed).write(event.SerializeToString())
        self.append(framed.getvalue())


def _text(name: str, text: str) -> Summary.Value:
    """Return a text, which TensorBoard shows as Markdown: as code, so that nothing in it has another meaning."""
    code = "".join(f"    {line}\n" for line in text.splitlines())
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=name, metadata=metadata, tensor=TensorProto(dtype=DT_STRING, string_val=[code.encode()]))

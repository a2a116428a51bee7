"""Prometheus: a file for the textfile collector of node_exporter, replaced atomically."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

from megalite.atomic_files import write_at_once
from megalite.errors import FileError
from megalite.extras.sinks.background import Record
from megalite.extras.sinks.description import Description

MOST_FAILURES = 600
"""Writes that may fail one after the other before the file is given up."""
_COUNTERS = {"consumed_samples": "consumed_samples_total", "consumed_tokens": "consumed_tokens_total"}
_NAMES = {
    "iteration_time_s": "iteration_time_seconds",
    "memory_copy_s": "memory_copy_seconds",
    "lm_loss": "loss",
    "skipped": "last_step_skipped",
}
_LABELLED = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusTextfile:
    """Service that writes `metrics.prom`: the last value of each key of the records, and whether the run goes on.

    A key KEY/PART is the metric `megalite_KEY` with the label `part`.
    """

    name = "prometheus"
    interval_s = 1.0

    def __init__(self, description: Description) -> None:
        folder = description.directory
        self._path = Path(description.option("prometheus_textfile") or f"{folder}/metrics.prom")
        self._run = description.name
        self._values: dict[tuple[str, str], float] = {}
        self._skipped = self._failed = 0

    def open(self) -> None:
        """Write the file: the run begins."""
        self._values["running", ""] = 1.0
        self._values["last_step_timestamp_seconds", ""] = time.time()
        self._write()

    def send(self, records: Sequence[Record]) -> None:
        """Replace the file by one with the last values."""
        for record in records:
            if "grad_norm" in record:
                self._values["last_step_timestamp_seconds", ""] = time.time()
                self._skipped += bool(record["skipped"])
            for key, value in record.items():
                base, _, part = (key.replace("/", "_") if key.endswith("_rank") else key).partition("/")
                if value is not None:
                    name = _COUNTERS.get(base) or _NAMES.get(base, base)
                    self._values[_LABELLED.sub("_", name), part] = float(value)
        try:
            self._write()
            self._failed = 0
        except FileError:  # a disk that is full has space again later
            self._failed += 1
            if self._failed > MOST_FAILURES:
                raise

    def close(self, *, ended: bool) -> None:
        """Write that the run is over, for alarms that wait for its next step; they find one that was killed."""
        self._values["running", ""] = 0.0 if ended else 1.0
        self._write()

    def _write(self) -> None:
        self._values["skipped_steps_total", ""] = float(self._skipped)
        lines = list[str]()
        for (name, part), value in sorted(self._values.items()):
            metric = f"megalite_{name}"
            if not lines or not lines[-1].startswith((f"{metric}{{", f"{metric} ")):
                what = "counter" if name.endswith("_total") else "gauge"
                lines += [f"# HELP {metric} {name} of metrics.jsonl.", f"# TYPE {metric} {what}"]
            labels = f'run="{_escaped(self._run)}"' + (f',part="{_escaped(part)}"' if part else "")
            lines.append(f"{metric}{{{labels}}} {_number(value)}")
        write_at_once(self._path, ("\n".join(lines) + "\n").encode())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")

"""State of the GPUs while something runs: clocks, power and temperature, sampled by nvidia-smi."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import NamedTuple

FIGURES = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
"""Figures that nvidia-smi is asked for: MHz, MHz, W, °C."""
REASONS = "clocks_event_reasons.active"
"""Bits that say why clocks are lowered."""
MILLISECONDS = 500


def card_name(name: str) -> str:
    """Return the name of a device as a part of the name of a file."""
    return re.sub("[^a-z0-9]+", "-", name.lower())


class Sample(NamedTuple):
    """State of one GPU."""

    time: float
    """Seconds since 1970."""
    figures: Sequence[str]
    """Figures as nvidia-smi writes them; it may not know one."""
    reasons: str


@contextmanager
def sampled() -> Iterator[list[Sample]]:
    """Yield a list that has the samples from inside the block after it; none where there is no nvidia-smi."""
    samples: list[Sample] = []
    if shutil.which("nvidia-smi") is None:
        yield samples
        return
    query = f"--query-gpu={','.join(('timestamp', *FIGURES, REASONS))}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", str(MILLISECONDS)]
    with tempfile.TemporaryFile("w+") as lines:
        with subprocess.Popen(command, stdout=lines, stderr=subprocess.DEVNULL) as process:
            try:
                yield samples
            finally:
                process.terminate()
        lines.seek(0)
        samples += read(lines)


def read(lines: Iterator[str]) -> Iterator[Sample]:
    """Yield the samples of nvidia-smi's lines. The last one may be cut."""
    for line in lines:
        time, *figures = (each.strip() for each in line.split(","))
        if len(figures) == len(FIGURES) + 1:
            *figures, reasons = figures
            yield Sample(datetime.strptime(time, "%Y/%m/%d %H:%M:%S.%f").timestamp(), figures, reasons)


def summary(samples: Sequence[Sample], begin: float, end: float) -> dict[str, object]:
    """Return minimum, median and maximum of each figure between two times, and what lowered the clocks."""
    chosen = [sample for sample in samples if begin <= sample.time <= end]
    found: dict[str, object] = {}
    for name, column in zip(FIGURES, zip(*(sample.figures for sample in chosen), strict=True), strict=False):
        values = [float(value) for value in column if value.replace(".", "", 1).isdigit()]
        if values:
            found[name] = [min(values), statistics.median(values), max(values)]
    return found | ({REASONS: sorted({sample.reasons for sample in chosen})} if chosen else {})

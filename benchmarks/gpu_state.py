"""What the GPUs do while something runs: clocks, power and temperature, sampled by nvidia-smi."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

FIGURES = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
"""Of nvidia-smi: MHz, MHz, W, °C."""
REASONS = "clocks_event_reasons.active"
"""Bits that say why clocks are lowered."""
MILLISECONDS = 500


@contextmanager
def sampled(found: dict[str, object]) -> Iterator[None]:
    """Add minimum, median and maximum of each figure over the time inside to `found`, and what lowered the clocks.

    Adds nothing where there is no nvidia-smi.
    """
    if shutil.which("nvidia-smi") is None:
        yield
        return
    query = f"--query-gpu={','.join((*FIGURES, REASONS))}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", str(MILLISECONDS)]
    with tempfile.TemporaryFile("w+") as lines:
        with subprocess.Popen(command, stdout=lines, stderr=subprocess.DEVNULL) as process:
            try:
                yield
            finally:
                process.terminate()
        lines.seek(0)
        found |= summary(lines.read())


def summary(lines: str) -> dict[str, object]:
    """Return the figures of lines of nvidia-smi, one a sample and GPU. What a GPU does not tell is left out."""
    rows = [[each.strip() for each in line.split(",")] for line in lines.splitlines()]
    rows = [row for row in rows if len(row) == len(FIGURES) + 1]  # the last line may be cut
    figures: dict[str, object] = {}
    for name, column in zip(FIGURES, zip(*rows, strict=True), strict=False):
        values = [float(value) for value in column if value.replace(".", "", 1).isdigit()]
        if values:
            figures[name] = [min(values), statistics.median(values), max(values)]
    return figures | ({REASONS: sorted({row[-1] for row in rows})} if rows else {})

"""State of this node's GPUs, as nvidia-smi reports it: driver, memory errors, throttling and NVLink.

Fields that a driver or a GPU does not know are skipped: older drivers have other names, and not all GPUs have ECC.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from megalite.doctor.findings import Finding

SECONDS = 10.0
"""Limit for a query: without persistence mode each query loads the driver, for some seconds; beyond this it hangs."""

_NAMES = "index,uuid,name,driver_version,ecc.errors.uncorrected.volatile.total,retired_pages.pending"
_SLOWED = ("hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown", "hw_slowdown")
_AS_CSV = " --format=csv,noheader,nounits"
_REMAPPED = "gpu_uuid,remapped_rows.pending,remapped_rows.failure"
_RESET = "stop what runs on it and reset it (nvidia-smi --gpu-reset), or start the node anew"


@dataclass(frozen=True)
class Gpu:
    """GPU of this node."""

    index: str
    uuid: str
    name: str
    driver: str
    uncorrected: str
    """Uncorrectable ECC errors since the driver was loaded; a number, or [N/A]."""
    retirement_pending: str


@dataclass(frozen=True)
class _Answer:
    code: int | None
    """Exit code; None: the command did not end in time."""
    text: str

    def rows(self) -> list[list[str]]:
        """Return the lines of values; none if the query was not understood."""
        return [line.split(", ") for line in self.text.splitlines() if line.strip()] if self.code == 0 else []


def examine_gpus(expected: int | None) -> tuple[list[Gpu], list[Finding]]:
    """Return the GPUs of this node, and what is wrong with them. `expected`: the number that there must be."""
    if shutil.which("nvidia-smi") is None:
        return [], [Finding("sick", f"{expected} GPUs are expected, and there is no nvidia-smi")] if expected else []
    slowed = "--query-gpu=index," + ",".join(f"clocks_event_reasons.{name}" for name in _SLOWED) + _AS_CSV
    rows = f"--query-remapped-rows={_REMAPPED}{_AS_CSV}"
    questions = (f"--query-gpu={_NAMES}{_AS_CSV}", slowed, rows, "nvlink --status")
    with ThreadPoolExecutor(len(questions)) as threads:
        names, throttling, remapped, links = threads.map(_ask, questions)
    if any(answer.code is None for answer in (names, throttling, remapped, links)):
        return [], [
            Finding("sick", f"nvidia-smi does not answer within {SECONDS:g} seconds: the driver, or a GPU, hangs")
        ]
    if throttling.code != 0:  # before driver 535
        throttling = _ask(slowed.replace("event", "throttle"))
    gpus = [Gpu(*row) for row in names.rows() if len(row) == len(_NAMES.split(","))]
    findings = [*_missing(names, gpus, expected), *_memory(gpus, remapped.rows()), *_throttling(throttling.rows())]
    return gpus, findings + list(_nvlinks(links.text))


def _ask(question: str) -> _Answer:
    process = subprocess.Popen(
        ["nvidia-smi", *question.split()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        # Not waited for: in a driver that hangs not even SIGKILL ends it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return _Answer(None, "")
    return _Answer(process.returncode, text)


def _missing(names: _Answer, gpus: Sequence[Gpu], expected: int | None) -> Iterator[Finding]:
    if names.code != 0 and "No devices were found" not in names.text:
        yield Finding("sick", f"nvidia-smi fails: {' '.join(names.text.split()) or f'exit code {names.code}'}")
    elif expected is not None and len(gpus) < expected:
        yield Finding(
            "sick",
            f"{len(gpus)} GPUs are there, and {expected} are expected: dmesg tells of one that was lost (Xid 79)",
        )


def _memory(gpus: Sequence[Gpu], remapped: Sequence[Sequence[str]]) -> Iterator[Finding]:
    numbers = {gpu.uuid: gpu.index for gpu in gpus}
    for gpu in gpus:
        if gpu.uncorrected.isdigit() and int(gpu.uncorrected) > 0:
            yield Finding(
                "sick", f"GPU {gpu.index} has met {gpu.uncorrected} uncorrectable memory errors (ECC): {_RESET}"
            )
        if gpu.retirement_pending == "Yes":
            yield Finding("sick", f"GPU {gpu.index} waits to retire a page of its memory: {_RESET}")
    for uuid, pending, failure in (row for row in remapped if len(row) == 3):
        which = f"GPU {numbers.get(uuid, uuid)}"
        if failure in ("1", "Yes"):
            yield Finding("sick", f"{which} has no row left to remap a bad one of its memory to: replace it")
        elif pending in ("1", "Yes"):
            yield Finding("sick", f"{which} waits to remap a row of its memory: {_RESET}")


def _throttling(rows: Sequence[Sequence[str]]) -> Iterator[Finding]:
    for index, *states in rows:
        thermal, brake, software, other = (state == "Active" for state in (*states, *[""] * 4)[:4])
        if thermal:
            yield Finding("sick", f"GPU {index} is slowed down since it is too hot: look at its cooling")
        elif brake:
            yield Finding("sick", f"GPU {index} is slowed down by the node's power supply (power brake)")
        elif software:
            yield Finding("warning", f"GPU {index} is slowed down since it is hot, before the run has begun")
        elif other:
            yield Finding(
                "warning", f"GPU {index} is slowed down by its hardware; if it stays so, look at cooling and power"
            )


def _nvlinks(text: str) -> Iterator[Finding]:
    """Yield broken NVLinks: a bridge connects all links of a GPU, so that only some inactive links are a fault."""
    active = {
        index: len(re.findall(r"Link \d+: [\d.]+ GB/s", block))
        for index, block in re.findall(r"^GPU (\d+):.*\n((?:[ \t]+.*\n?)*)", text, re.MULTILINE)
    }
    most = max(active.values(), default=0)
    for index, count in active.items():
        if 0 < count < most:
            yield Finding("sick", f"GPU {index} has {count} active NVLinks, and other GPUs of the node {most}")
        elif count < most:
            yield Finding("warning", f"GPU {index} has no active NVLink, and other GPUs of the node have {most}")

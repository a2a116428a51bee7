"""Check of this node alone, without torch: its GPUs, its shared memory, and the number of files a process may open.

The state of the GPUs is what nvidia-smi reports. Fields that a driver or a GPU does not know are skipped: older drivers
have other names, and not all GPUs have ECC.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megalite.extras.doctor.findings import Finding, Severity
from megalite.process.programs import start

SECONDS = 10.0
"""Limit for a query, in seconds. Without persistence mode each query loads the driver, which takes some seconds."""
SHARED_MEMORY = Path("/dev/shm")
_ENOUGH_SHARED_MEMORY = 2**30
_BASE_FILES = 512
_FILES_PER_RANK = 4  # one connection per group that two ranks may share
_FILES_PER_DATA_FILE = 2

_NAMES = "index,uuid,name,driver_version,ecc.errors.uncorrected.volatile.total,retired_pages.pending"
_AS_CSV = " --format=csv,noheader,nounits"
_REMAPPED = "gpu_uuid,remapped_rows.pending,remapped_rows.failure"
_RESET = "stop what runs on it and reset it (nvidia-smi --gpu-reset), or restart the node"
_SLOWED: Mapping[str, tuple[Severity, str]] = {
    "hw_thermal_slowdown": ("sick", "because it is too hot: check its cooling"),
    "hw_power_brake_slowdown": ("sick", "by the node's power supply (power brake)"),
    "sw_thermal_slowdown": ("warning", "because it is hot, before the run has begun"),
    "hw_slowdown": ("warning", "by its hardware; if this continues, check cooling and power"),
}
"""Reasons for which a GPU is slowed down, as nvidia-smi names them; of several only the first is reported."""


@dataclass(frozen=True)
class NodeState:
    """State of a node, as shown in a table."""

    gpus: tuple[str, ...]
    """Names of the GPUs."""
    driver: str
    open_files: int
    """Number of files that each process may open; -1: no limit."""
    shared_memory: int | None
    """Free bytes; None: there is no shared memory."""


def examine_node(expected_gpus: int | None, *, ranks: int = 1, data_files: int = 0) -> tuple[NodeState, list[Finding]]:
    """Return this node's state and its faults, for a run of `ranks` ranks that reads `data_files` files."""
    gpus, findings = examine_gpus(expected_gpus)
    shared_memory = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    if len(gpus) > 1 and (shared_memory or 0) < _ENOUGH_SHARED_MEMORY:
        text = (
            f"{SHARED_MEMORY} has {(shared_memory or 0) >> 20} MiB free, and NCCL needs about 1 GiB: start the "
            "container with more (--shm-size), or remove what was left there"
        )
        findings.append(Finding("warning", text))
    open_files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _BASE_FILES + _FILES_PER_RANK * ranks + _FILES_PER_DATA_FILE * data_files
    if open_files != resource.RLIM_INFINITY and open_files < needed:
        may = "" if most == resource.RLIM_INFINITY or most >= needed else f" (here at most {most})"
        text = f"a process may open {open_files} files, and a run needs about {needed}: raise `ulimit -n`{may}"
        findings.append(Finding("sick", text))
    driver = gpus[0].driver if gpus else ""
    return NodeState(tuple(gpu.name for gpu in gpus), driver, open_files, shared_memory), findings


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
    """Return the GPUs of this node and their faults. `expected`: the required number of GPUs."""
    if shutil.which("nvidia-smi") is None:
        return [], [Finding("sick", f"{expected} GPUs are expected, and there is no nvidia-smi")] if expected else []
    slowed = "--query-gpu=index," + ",".join(f"clocks_event_reasons.{name}" for name in _SLOWED) + _AS_CSV
    rows = f"--query-remapped-rows={_REMAPPED}{_AS_CSV}"
    questions = (f"--query-gpu={_NAMES}{_AS_CSV}", slowed, rows, "nvlink --status")
    with ThreadPoolExecutor(len(questions)) as threads:
        names, throttling, remapped, links = answers = list(threads.map(_ask, questions))
    if any(answer.code is None for answer in answers):
        text = f"nvidia-smi does not answer within {SECONDS:g} seconds: the driver, or a GPU, hangs"
        return [], [Finding("sick", text)]
    if throttling.code != 0:  # before driver 535
        throttling = _ask(slowed.replace("event", "throttle"))
    gpus = [Gpu(*row) for row in names.rows() if len(row) == len(_NAMES.split(","))]
    findings = [*_missing(names, gpus, expected), *_memory(gpus, remapped.rows()), *_throttling(throttling.rows())]
    return gpus, findings + list(_nvlinks(links.text))


def _ask(question: str) -> _Answer:
    """Return the answer of nvidia-smi, or none if it does not come in time."""
    process = start(
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
        # No wait for the process: if the driver hangs, not even SIGKILL ends it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return _Answer(None, "")
    return _Answer(process.returncode, text)


def _missing(names: _Answer, gpus: Sequence[Gpu], expected: int | None) -> Iterator[Finding]:
    if names.code != 0 and "No devices were found" not in names.text:
        yield Finding("sick", f"nvidia-smi fails: {' '.join(names.text.split()) or f'exit code {names.code}'}")
    elif expected is not None and len(gpus) < expected:
        lost = "dmesg says if one was lost (Xid 79)"
        yield Finding("sick", f"{len(gpus)} GPUs are there, and {expected} are expected: {lost}")


def _memory(gpus: Sequence[Gpu], remapped: Sequence[Sequence[str]]) -> Iterator[Finding]:
    """Yield what is wrong with the memory of GPUs: errors, and rows that wait to be remapped or cannot be."""
    numbers = {gpu.uuid: gpu.index for gpu in gpus}
    for gpu in gpus:
        if gpu.uncorrected.isdigit() and int(gpu.uncorrected) > 0:
            errors = f"{gpu.uncorrected} uncorrectable memory errors (ECC)"
            yield Finding("sick", f"GPU {gpu.index} has had {errors}: {_RESET}")
        if gpu.retirement_pending == "Yes":
            yield Finding("sick", f"GPU {gpu.index} waits to retire a page of its memory: {_RESET}")
    for uuid, pending, failure in (row for row in remapped if len(row) == 3):
        which = f"GPU {numbers.get(uuid, uuid)}"
        if failure in ("1", "Yes"):
            yield Finding("sick", f"{which} has no spare row left to remap a bad row of its memory: replace it")
        elif pending in ("1", "Yes"):
            yield Finding("sick", f"{which} waits to remap a row of its memory: {_RESET}")


def _throttling(rows: Sequence[Sequence[str]]) -> Iterator[Finding]:
    for index, *states in rows:
        for state, (severity, reason) in zip(states, _SLOWED.values(), strict=False):
            if state == "Active":
                yield Finding(severity, f"GPU {index} is slowed down {reason}")
                break


def _nvlinks(text: str) -> Iterator[Finding]:
    """Yield broken NVLinks: a bridge connects all links of a GPU, so it is a fault if only some of them are
    inactive."""
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

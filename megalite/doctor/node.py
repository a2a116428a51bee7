"""Check of this node alone: its GPUs, its shared memory, and the number of files a process may open. Without torch."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megalite.doctor.findings import Finding
from megalite.doctor.gpus import examine_gpus

SHARED_MEMORY = Path("/dev/shm")
_ENOUGH_SHARED_MEMORY = 2**30
_BASE_FILES = 512
_FILES_A_RANK = 4  # a connection in each of the groups that two ranks may share
_FILES_A_DATA_FILE = 2


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
    """Return this node's state and what is wrong with it, for a run on `ranks` ranks that reads this many files."""
    gpus, findings = examine_gpus(expected_gpus)
    shared_memory = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    open_files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    driver = gpus[0].driver if gpus else ""
    findings += _shared_memory(shared_memory, len(gpus))
    findings += _open_files(open_files, most, _BASE_FILES + _FILES_A_RANK * ranks + _FILES_A_DATA_FILE * data_files)
    return NodeState(tuple(gpu.name for gpu in gpus), driver, open_files, shared_memory), findings


def _shared_memory(free: int | None, gpus: int) -> Iterator[Finding]:
    if gpus > 1 and (free or 0) < _ENOUGH_SHARED_MEMORY:
        yield Finding(
            "warning",
            f"{SHARED_MEMORY} has {(free or 0) >> 20} MiB free, and NCCL needs about 1 GiB: start the container with "
            "more (--shm-size), or remove what was left there",
        )


def _open_files(limit: int, most: int, needed: int) -> Iterator[Finding]:
    if limit != resource.RLIM_INFINITY and limit < needed:
        may = "" if most == resource.RLIM_INFINITY or most >= needed else f", which may be {most} at most here"
        yield Finding(
            "sick", f"a process may open {limit} files, and a run needs about {needed}: raise `ulimit -n`{may}"
        )

"""Rank, local rank and world size of this process, from the launcher's environment variables; without torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from megalite.errors import ConfigurationError

Value = TypeVar("Value")
_SIZES = {
    "SLURM_STEP_NUM_TASKS": ("srun", "SLURM_PROCID"),
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "OMPI_COMM_WORLD_RANK"),
    "PMI_SIZE": ("mpiexec", "PMI_RANK"),
    "MV2_COMM_WORLD_SIZE": ("mpirun_rsh", "MV2_COMM_WORLD_RANK"),
    "MVP_COMM_WORLD_SIZE": ("mpirun_rsh", "MVP_COMM_WORLD_RANK"),
    "JSM_NAMESPACE_SIZE": ("jsrun", "JSM_NAMESPACE_RANK"),
    "FLUX_JOB_SIZE": ("flux", "FLUX_TASK_RANK"),
    "LWS_GROUP_SIZE": ("a LeaderWorkerSet", "LWS_WORKER_INDEX"),
    "PET_NNODES": ("a training operator", "PET_NODE_RANK"),
}
"""Variable with the number of processes -> the launcher that sets it, and its variable with this process's number."""
_NUMBERS = {
    "PALS_RANKID": "mpiexec",
    "PMIX_RANK": "an MPI launcher",
    "JOB_COMPLETION_INDEX": "an indexed Job of Kubernetes",
}
"""Variable with this process's number -> the launcher that sets it, which does not give the number of processes."""
_FIRST_SPECIAL_STEP = 2**32 - 16  # SLURM's step IDs from here on are batch scripts and salloc shells, not tasks


@dataclass(frozen=True)
class Place:
    """Position of this process among those that torchrun, or a launcher that sets the same variables, started."""

    rank: int
    local_rank: int
    world_size: int


def place_from_environment() -> Place:
    """Return this process's place. Without a launcher it is rank 0 of 1.

    Raises:
        ConfigurationError: a variable is wrong or missing; or a launcher started several processes without setting
            these variables, so that each of them would train alone.
    """
    environment = os.environ
    rank, local_rank, world_size = (_number(environment, name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if rank is None and world_size in (None, 1):
        _check_alone(environment)
    if world_size is None:
        if rank is not None or local_rank is not None:
            name = "LOCAL_RANK" if rank is None else "RANK"
            raise ConfigurationError(
                f"{name}={environment[name]} without WORLD_SIZE, the number of ranks: set it, or for one process alone "
                f"unset {name}"
            )
        world_size = 1
    if world_size < 1:
        raise ConfigurationError(f"WORLD_SIZE={world_size}: must be at least 1, the number of ranks")
    if world_size > 1:
        _check_several(environment, world_size)
    place = Place(rank or 0, local_rank or 0, world_size)
    if place.rank >= world_size:
        raise ConfigurationError(f"RANK={place.rank}: WORLD_SIZE={world_size} ranks are numbered 0 to {world_size - 1}")
    return place


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        unset = " (is a shell variable not set?)" if not text.strip() else ""
        raise ConfigurationError(f"{name}={text!r}{unset}: the launcher must give a whole number of at least 0")
    return int(text)


def _check_several(environment: Mapping[str, str], world_size: int) -> None:
    """Raise ConfigurationError if a variable that one of several ranks needs to reach the others is missing."""
    needed = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        raise ConfigurationError(
            f"WORLD_SIZE={world_size} without {', '.join(missing)}: torchrun sets them all. Under another launcher "
            "give each rank its RANK, its LOCAL_RANK within its node (0 if it is alone on the node), and all "
            "the same MASTER_ADDR and MASTER_PORT, a host that they all reach (rank 0's) and a free port on it"
        )
    port = environment["MASTER_PORT"]
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ConfigurationError(f"MASTER_PORT={port!r} is not a port: give a number from 1 to 65535")


def _check_alone(environment: Mapping[str, str]) -> None:
    """Raise ConfigurationError if a launcher's variables show that this process is one of several."""
    sizes = {name: _stated_size(environment, name) for name in _SIZES if environment.get(name)}
    for name, size in sizes.items():
        if size > 1:
            launcher, rank = _SIZES[name]
            raise _not_told(f"{launcher} started {size} processes ({name}={environment[name]})", rank, f"${name}")
    for name, launcher in _NUMBERS.items():
        if environment.get(name) and (not sizes or name == "JOB_COMPLETION_INDEX"):
            raise _not_told(f"{launcher} started this as process {environment[name]} of several ({name})", name, "...")


def _stated_size(environment: Mapping[str, str], name: str) -> int:
    """Return the number of processes in a variable; 1 if it does not count processes like this one."""
    step = environment.get("SLURM_STEP_ID", "0")
    if name == "SLURM_STEP_NUM_TASKS" and (not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP):
        return 1
    most = environment[name].rpartition(":")[2]  # PET_NNODES may be a range, 1:4
    return int(most) if most.isascii() and most.isdigit() else 1


def _not_told(launched: str, rank: str, size: str) -> ConfigurationError:
    return ConfigurationError(
        f"{launched}, but gave them no ranks: each would run alone. Start one torchrun per node, "
        f"or set in each process RANK=${rank} WORLD_SIZE={size}, LOCAL_RANK (its number on its node), MASTER_ADDR and "
        "MASTER_PORT (a host that all reach, rank 0's, and a free port on it). If each is to run alone, set RANK=0 "
        "WORLD_SIZE=1"
    )


def ranks_by_value(values: Mapping[int, Value]) -> dict[Value, list[int]]:
    """Return the ranks that have each value. `values`: by rank."""
    ranks: dict[Value, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def ranks_text(ranks: Iterable[int], most: int = 16) -> str:
    """Return ranks as text: `rank 3` or `ranks 0, 2-5`. If there are more than `most` pieces, the rest is counted."""
    return numbered("rank", ranks, most)


def numbered(what: str, numbers: Iterable[int], most: int = 16) -> str:
    """Return numbers as text: `step 3` or `steps 0, 2-5`, shortened as in `ranks_text`."""
    ordered = sorted(set(numbers))
    runs = [[number for _, number in run] for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])]
    pieces = [piece for run in runs for piece in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    if len(pieces) > most:
        pieces = [*pieces[:most], f"... ({len(ordered)} of them)"]
    return f"{what}{'s' if len(ordered) > 1 else ''} {', '.join(pieces)}"

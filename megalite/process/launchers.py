"""Variables of launchers: which processes each says that it has started, and where their rank 0 is; without torch."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from megalite.errors import ConfigurationError

POD_PORT = 29500
"""Port of rank 0's store in a pod of Kubernetes, which has an address of its own."""
GENERATION = "MEGALITE_GENERATION"
"""Variable with the number of the generation of a rank that is restarted warm."""
MEMORY_FILES = "MEGALITE_MEMORY_FILES"
"""Variable with the process ID of such a rank, a space, and the descriptors of files in memory that outlive it."""
_FIRST_SPECIAL_STEP = 2**32 - 16  # SLURM's step IDs from here on are batch scripts and salloc shells, not tasks
_LOWEST_PORT, _PORTS = 20000, 10000  # below the ports that systems hand out by themselves


class Number(NamedTuple):
    """Number of at least 0, and the variable that it was read from."""

    value: int
    name: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


@dataclass(frozen=True)
class LauncherInfo:
    """Facts about this process and the others, as a launcher tells them; None for each that it does not tell."""

    launcher: str = ""
    rank: Number | None = None
    world_size: Number | None = None
    local_rank: Number | None = None
    local_world_size: Number | None = None
    host: str | None = None
    port: int | None = None
    agents: bool = False
    """True if each process may be an agent, such as torchrun or Open MPI's, which has started ranks of its own."""
    servers: int | None = None
    """Number of the last ranks that the launcher calls parameter servers."""

    def or_else(self, other: LauncherInfo) -> LauncherInfo:
        """Return these facts, and those of another launcher of the same processes where these say nothing.

        Raises ConfigurationError if they disagree. A process that sees one GPU at most may have any local rank.
        """
        pairs = [
            (self.rank, other.rank),
            (self.world_size, other.world_size),
            (self.local_world_size, other.local_world_size),
        ]
        if "," in os.environ.get("CUDA_VISIBLE_DEVICES", ","):
            pairs.append((self.local_rank, other.local_rank))
        for mine, theirs in pairs:
            if mine and theirs and mine.value != theirs.value:
                raise ConfigurationError(
                    f"{mine} disagrees with {theirs}, which {other.launcher} set: unset the wrong one, or for a "
                    "process that runs alone set RANK=0 WORLD_SIZE=1"
                )
        names = [field.name for field in fields(self) if getattr(self, field.name) in (None, "")]
        return replace(self, **{name: getattr(other, name) for name in names})

    def within(self, outer: LauncherInfo) -> LauncherInfo:
        """Return what this launcher and an outer one, inside of whose processes it may run, tell together."""
        whole = None not in (self.rank, self.world_size, self.local_rank)
        if whole and outer.agents and _value(outer.world_size) != _value(self.world_size):
            return self  # the outer one started agents
        if _value(outer.world_size) == 1 and self.world_size:
            return self  # the outer one started a shell, or the inner launcher
        if _value(self.world_size) == 1 and self.launcher and (outer.rank or outer.world_size):
            return outer  # started alone, by a launcher inside of one of several processes
        return self.or_else(outer)


def _value(number: Number | None) -> int | None:
    return number.value if number else None


def read_number(environment: Mapping[str, str], name: str) -> Number | None:
    """Return the number in a variable; None if it is not set. Raises ConfigurationError if it is not a number."""
    text = environment.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        unset = " (is a shell variable not set?)" if not text.strip() else ""
        raise ConfigurationError(f"{name}={text!r}{unset}: the launcher must give a whole number of at least 0")
    return Number(int(text), name)


class _Names(NamedTuple):
    """Names of the variables that a launcher sets in each process, "" for what it does not tell."""

    launcher: str
    rank: str
    world_size: str = ""
    local_rank: str = ""
    local_world_size: str = ""
    job: str = ""

    def read(self, environment: Mapping[str, str]) -> LauncherInfo:
        """Return what its variables tell: nothing if it has set none of them."""
        rank, world_size, local_rank, local_world_size = (
            read_number(environment, name) if environment.get(name) else None for name in self[1:5]
        )
        if not (rank or world_size):
            return LauncherInfo()
        port = derived_port(environment[self.job]) if environment.get(self.job) else None
        return LauncherInfo(self.launcher, rank, world_size, local_rank, local_world_size, port=port)


def _parts(prefix: str) -> tuple[str, str, str, str]:
    return f"{prefix}_RANK", f"{prefix}_SIZE", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE"


_MPI_LAUNCHERS = (
    _Names("Open MPI's mpirun", *_parts("OMPI_COMM_WORLD"), "PMIX_NAMESPACE"),
    _Names("mpirun_rsh", *_parts("MV2_COMM_WORLD")),
    _Names("mpirun_rsh", *_parts("MVP_COMM_WORLD")),
    _Names("jsrun", *_parts("JSM_NAMESPACE")),
    _Names("horovodrun", *_parts("HOROVOD"), "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    _Names("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", job="FLUX_JOB_ID"),
    _Names("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Names("mpiexec", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    _Names("mpiexec -pmi-port", "PMI_ID", "", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_PORT"),
    _Names("mpiexec of PALS", "PALS_RANKID", "", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_APID"),
    _Names("a PMIx launcher", "PMIX_RANK", job="PMIX_NAMESPACE"),
)
_POD_LAUNCHERS = (
    _Names("a training operator", "PET_NODE_RANK", "PET_NNODES"),
    _Names("a LeaderWorkerSet", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE"),
    _Names("an indexed Job of Kubernetes", "JOB_COMPLETION_INDEX"),
)
HOROVOD_SETTINGS = {
    "HOROVOD_AUTOTUNE": "--ddp-bucket-size",
    "HOROVOD_FUSION_THRESHOLD": "--ddp-bucket-size, in elements",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "--all-reduce-algorithm hierarchical",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "--distributed-timeout-minutes",
    "HOROVOD_TIMELINE": "--profile --use-pytorch-profiler",
}
"""Settings of Horovod that change nothing here -> the flag for each."""
UNCLEAR_RANKS = ("GLOBAL_RANK", "NODE_RANK", "GROUP_RANK")
"""Variables that tell that there are other processes, if there is no better one, but not which rank this one is."""
RANK_VARIABLES = ("RANK", *(names.rank for names in (*_MPI_LAUNCHERS, *_POD_LAUNCHERS)), "SLURM_PROCID", *UNCLEAR_RANKS)


def launchers(environment: Mapping[str, str]) -> Iterator[LauncherInfo]:
    """Yield what launchers of several processes tell, from the innermost kind to the outermost.

    Raises ConfigurationError for elastic runs of Horovod, and for variables that are wrong or contradict each other.
    """
    if environment.get("HOROVOD_ELASTIC", "0") not in ("", "0"):
        raise ConfigurationError(
            f"HOROVOD_ELASTIC={environment['HOROVOD_ELASTIC']!r:.20}: horovodrun would replace ranks within the run; "
            "use torchrun's --nnodes MIN:MAX and --max-restarts N with --save DIR --resume auto, which goes on from "
            "the last checkpoint with the ranks that there are (docs/launchers.md)"
        )
    told = LauncherInfo()
    for launcher in _MPI_LAUNCHERS:
        told = told.or_else(launcher.read(environment))
    yield _meet_here(told)
    yield _meet_here(_slurm(environment))
    yield _kubernetes(environment)


def _meet_here(told: LauncherInfo) -> LauncherInfo:
    """Return the same, with an address of this machine if all ranks run on it."""
    if told.rank is None or told.world_size is None or _value(told.local_world_size) != told.world_size.value:
        return told
    return replace(told, host="127.0.0.1", port=told.port or derived_port(str(launcher_process([told.rank.name]))))


def _slurm(environment: Mapping[str, str]) -> LauncherInfo:
    """Return what srun tells its tasks, and that the shells of sbatch and salloc are alone."""
    counted = environment.get("SLURM_STEP_NUM_TASKS")
    if not counted and not environment.get("SLURM_STEP_ID") and environment.get("SLURM_PROCID", "0") == "0":
        return LauncherInfo()  # a batch script, which has the job's SLURM_NTASKS
    step = environment.get("SLURM_STEP_ID", "0")
    if not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP:
        return LauncherInfo("SLURM", world_size=Number(1, "SLURM_STEP_ID"))
    rank, world_size, local_rank, node = (
        read_number(environment, f"SLURM_{name}")
        for name in ("PROCID", "STEP_NUM_TASKS" if counted else "NTASKS", "LOCALID", "NODEID")
    )
    counts = environment.get("SLURM_STEP_TASKS_PER_NODE", "")  # 2(x3),1
    tasks = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))]
    here = tasks[node.value] if node and node.value < len(tasks) else None
    return LauncherInfo(
        "srun",
        rank,
        world_size,
        local_rank,
        Number(here, "SLURM_STEP_TASKS_PER_NODE") if here else None,
        first_host(environment.get("SLURM_STEP_NODELIST", "")),
        derived_port(*(environment.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))),
        agents=set(tasks) == {1},
    )


def first_host(nodes: str) -> str | None:
    """Return the first host of SLURM's list of nodes: n08 of `n[08-11,15],x1`; None if the list is empty."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", nodes)
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0]) if first else None


def _kubernetes(environment: Mapping[str, str]) -> LauncherInfo:
    """Return what a pod knows of the pods of its Job, JobSet, TrainJob or LeaderWorkerSet: each has one process."""
    nodes, here = environment.get("PET_NNODES", ""), environment.get("PET_NPROC_PER_NODE", "")
    counted = "LOCAL_RANK" in environment or environment.get("WORLD_SIZE", nodes) == nodes  # pods, or ranks in them
    auto = here and not here.isdigit() and not counted
    if ":" in nodes or (here.isdigit() and int(here) > 1) or auto:
        name = "PET_NNODES" if ":" in nodes else "PET_NPROC_PER_NODE"
        raise ConfigurationError(f"{name}={environment[name]} is for torchrun: start it in the pod, instead of python")
    told = LauncherInfo()
    for launcher in _POD_LAUNCHERS:
        told = told.or_else(launcher.read(environment))
    if not told.launcher:
        return told
    port = read_number(environment, "PET_MASTER_PORT")
    return replace(
        told,
        local_rank=Number(0, "the pod"),
        local_world_size=Number(1, "the pod"),
        host=environment.get("PET_MASTER_ADDR") or environment.get("LWS_LEADER_ADDRESS"),
        port=port.value if port else POD_PORT,
        agents=True,
    )


def derived_port(*job: str) -> int:
    """Return a port that all processes of a job compute from its name, and probably no other job."""
    return _LOWEST_PORT + zlib.crc32(" ".join(job).encode()) % _PORTS


def launcher_process(names: Sequence[str]) -> int:
    """Return the ID of the process that started the ranks of this machine: the nearest without these variables."""
    process = os.getppid()
    try:
        while process > 1:
            environment = b"\0" + Path(f"/proc/{process}/environ").read_bytes()
            if not any(f"\0{name}=".encode() in environment for name in names):
                break
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it belongs to another user, as SLURM's does, or this is not Linux
        pass
    return process


def hosted_by_launcher() -> bool:
    """Tell whether the launcher hosts the store instead of rank 0. torch reads the same variable."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt() -> str:
    """Return a name of this attempt of torchrun, for the keys of a store that it keeps over attempts.

    The agents count their attempts apart: one that joins later begins with 0. Where rank 0 hosts a store for each
    attempt, all have the same name. A warm restart adds its generation.
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if hosted_by_launcher() else "0"
    return f"{count}.{os.environ[GENERATION]}" if GENERATION in os.environ else count


def starts_again() -> bool:
    """Tell whether these ranks have taken the place of others in a warm restart."""
    return os.environ.get(GENERATION, "1") != "1"

"""Requirements of a cluster of tests/slurm on the machine: commands, namespaces, processes and cgroups."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "ip", "nsenter", "unshare")
PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2"


class ClusterError(Exception):
    """Reason why SLURM cannot run here, and what to do."""


def require_programs() -> None:
    """Raise ClusterError where this machine cannot run SLURM, saying what it lacks."""
    if os.geteuid() != 0:
        raise ClusterError("a SLURM is started by root: sudo make test-slurm")
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise ClusterError(f"no {', '.join(missing)} here: apt-get install --no-install-recommends {PACKAGES}")


def run(*command: str, environment: Mapping[str, str] | None = None, check: bool = True) -> str:
    """Return the output of a command. Raises ClusterError, with its errors, if it fails."""
    result = subprocess.run(
        command,
        env=os.environ | dict(environment or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if check and result.returncode:
        raise ClusterError(f"{' '.join(command)}: {(result.stderr or result.stdout).strip()}")
    return result.stdout


def run_quietly(*command: str) -> None:
    """Run a command that may fail."""
    with suppress(ClusterError, OSError):
        run(*command)


def host_name() -> str:
    """The machine's, as SLURM takes it."""
    return socket.gethostname().partition(".")[0]


def can_make_namespaces() -> bool:
    """Tell whether this machine allows network and host-name namespaces, and a bridge between them."""
    trial = f"trial{os.getpid()}"
    try:
        run("ip", "netns", "add", trial)
        run("ip", "link", "add", trial, "type", "bridge")
        run("nsenter", f"--net=/run/netns/{trial}", "unshare", "--uts", "--mount", "hostname", "trial")
    except (ClusterError, OSError):
        return False
    finally:
        run_quietly("ip", "link", "delete", trial)
        run_quietly("ip", "netns", "delete", trial)
    return True


def in_networks(networks: Iterable[Path]) -> Iterator[int]:
    """Numbers of the processes in network namespaces."""
    inodes = {path.stat().st_ino for path in networks}
    return _processes(lambda folder: (folder / "ns" / "net").stat().st_ino in inodes)


def with_variables(*variables: str) -> Iterator[int]:
    """Numbers of the processes that were started with all of these variables; `NAME=` stands for any value."""

    def has_all(folder: Path) -> bool:
        found = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        return all(
            any(each == variable or (variable.endswith("=") and each.startswith(variable)) for each in found)
            for variable in variables
        )

    return _processes(has_all)


def _processes(condition: Callable[[Path], bool]) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if condition(folder):
                yield int(folder.name)


def is_alive(file: Path) -> bool:
    """Tell whether the process whose number is in a file exists."""
    try:
        os.kill(int(file.read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


def kill_all(find: Callable[[], Iterable[int]]) -> None:
    """Kill the processes that `find` finds, again: one that is ending may have started another meanwhile."""
    for _ in range(3):
        for process in find():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


def remove_cgroups(nodes: Iterable[str]) -> None:
    """Remove the cgroups that SLURM has made for nodes, from the innermost to the outermost."""
    for node in nodes:
        for top in CGROUPS.glob(f"*/slurm_{node}"):
            for folder, _, _ in os.walk(top, topdown=False):
                with suppress(OSError):
                    os.rmdir(folder)

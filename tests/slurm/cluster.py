"""A real SLURM of a few nodes on one machine, for tests: `python -m tests.slurm.cluster up`, and then

    export SLURM_CONF=/run/megalite-slurm/slurm.conf
    sbatch --nodes=2 --wrap 'srun hostname'
    python -m tests.slurm.cluster fail n1        cut off from the network; heal n1
    python -m tests.slurm.cluster kill n1        power off; restart n1
    python -m tests.slurm.cluster down

A node is a network namespace, with an address on a bridge, and a slurmd in host name and mount namespaces of its own
(its /etc/hosts knows the nodes). Where namespaces are refused, all nodes have the machine's one address, and none can
be cut off. The file system and the processes' numbers are shared. All files are in one folder, and the ports are no
SLURM's usual ones: a SLURM that the machine has is neither disturbed nor asked. `down` leaves nothing behind.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tests.slurm.configuration import CONFIGURATION, PROLOG

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("/run/megalite-slurm")
CGROUPS = Path("/sys/fs/cgroup")
BRIDGE, NETWORK = "megalite0", "10.77.0"
CONTROLLER = "controller"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "ip", "nsenter", "unshare")
PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2"
CPUS, MEGABYTES = 4, 8000
SECONDS_TO_NOTICE = 15
"""After which a node that does not answer is down (SlurmdTimeout)."""


class ClusterError(Exception):
    """What keeps a SLURM from running here, and what to do."""


class Cluster:
    """The cluster of this machine; at most one runs. A context manager: up on the way in, down on the way out.

    Args:
        size: nodes, named n0, n1, ...
        namespaces: give each a network of its own; None: where the machine lets us.
    """

    def __init__(self, size: int = 4, namespaces: bool | None = None) -> None:
        self.size = size
        self.nodes = tuple(f"n{number}" for number in range(size))
        self.namespaces = can_make_namespaces() if namespaces is None else namespaces
        self.limits_memory = (CGROUPS / "memory" / "memory.limit_in_bytes").exists()

    # ------------------------------------------------------------------------------------------------ up and down

    def up(self) -> None:
        """Start all daemons and wait until every node is idle.

        Raises ClusterError where something is missing here, or does not come up; nothing is left behind then.
        """
        require_programs()
        if FOLDER.exists():
            raise ClusterError(f"{FOLDER} is there: another cluster runs, or ran (python -m tests.slurm.cluster down)")
        try:
            self._write_files()
            self._start_munge()
            if self.namespaces:
                self._make_network()
            self._daemon(["slurmctld", "-c"], CONTROLLER)
            for node in self.nodes:
                self.restart(node)
            self.wait_until_idle()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End every process of the cluster and of its jobs, and undo all that `up` did; also after half an `up`."""
        for _ in range(3):  # a daemon that is ending may have started another process meanwhile
            for process in self._processes():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.1)
        for space in _namespaces():
            _quietly(
                "ip", "link", "delete", space.name
            )  # the cable first: with the namespace it would go some time later
            _quietly("ip", "netns", "delete", space.name)
        _quietly("ip", "link", "delete", BRIDGE)
        _remove_cgroups()
        shutil.rmtree(FOLDER, ignore_errors=True)

    def __enter__(self) -> Cluster:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def _write_files(self) -> None:
        FOLDER.mkdir(mode=0o755)
        (FOLDER / "state").mkdir()
        for node in self.nodes:
            (FOLDER / node / "spool").mkdir(parents=True)
        text = CONFIGURATION.format(
            folder=FOLDER,
            controller=CONTROLLER if self.namespaces else _host_name(),
            address=self._address(CONTROLLER),
            tracking="cgroup" if self.limits_memory else "linuxproc",
            task="cgroup" if self.limits_memory else "none",
            memory="_Memory" if self.limits_memory else "",
            notice=SECONDS_TO_NOTICE,
        )
        (FOLDER / "slurm.conf").write_text(text + "".join(map(self._describe, self.nodes)))
        if self.limits_memory:
            (FOLDER / "cgroup.conf").write_text(
                f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={CGROUPS}\nCgroupAutomount=no\nConstrainRAMSpace=yes\n"
            )
        prolog = FOLDER / "prolog"
        prolog.write_text(PROLOG.format(folder=FOLDER))
        prolog.chmod(0o755)
        names = (CONTROLLER, *self.nodes)
        own = "".join(f"{self._address(name)} {name}\n" for name in names)
        (FOLDER / "hosts").write_text("127.0.0.1 localhost\n" + own)

    def _describe(self, node: str) -> str:
        """The node's line in slurm.conf."""
        here = "" if self.namespaces else f"NodeHostname={_host_name()} Port={26820 + self.nodes.index(node)} "
        return (
            f"NodeName={node} NodeAddr={self._address(node)} {here}CPUs={CPUS} Boards=1 SocketsPerBoard=1 "
            f"CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory={MEGABYTES} State=UNKNOWN\n"
        )

    def _address(self, name: str) -> str:
        if not self.namespaces:
            return "127.0.0.1"
        return f"{NETWORK}.{1 if name == CONTROLLER else 10 + self.nodes.index(name)}"

    def _start_munge(self) -> None:
        key = FOLDER / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={FOLDER}/munge.{suffix}" for option, suffix in files.items()]
        _run("munged", f"--key-file={key}", *options)

    def _make_network(self) -> None:
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "address", "add", f"{self._address(CONTROLLER)}/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        for node in self.nodes:
            space = _namespace(node)
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", _namespace(node), "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", _namespace(node), "master", BRIDGE, "up")
            _run("ip", "-netns", space, "address", "add", f"{self._address(node)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _run("ip", "-netns", space, "link", "set", device, "up")

    def _daemon(self, command: Sequence[str], name: str) -> None:
        """Start a daemon with what makes it the node `name`."""
        if self.namespaces:
            inside = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
            command = ["unshare", "--uts", "--mount", "sh", "-c", inside, f"{FOLDER}/hosts", name, *command]
            if name != CONTROLLER:  # not `ip netns exec`, which mounts another /sys, without cgroups
                command = ["nsenter", f"--net=/run/netns/{_namespace(name)}", *command]
        elif name != CONTROLLER:
            command = [*command, "-N", name]
        _run(*command, MEGALITE_SLURM_NODE=name)

    def _processes(self, node: str = "") -> Iterator[int]:
        """Processes of a node, or of all: in its network, or started with its name, or for a job on it."""
        networks = {path.stat().st_ino for path in _namespaces() if path.name == _namespace(node) or not node}
        daemon = f"MEGALITE_SLURM_NODE={node}".encode()
        job = {f"SLURM_CONF={FOLDER}/slurm.conf".encode(), f"SLURMD_NODENAME={node}".encode()}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (folder / "ns" / "net").stat().st_ino in networks or _has(folder, daemon) or _has(folder, *job):
                    yield int(folder.name)
        if not node:
            with suppress(OSError, ValueError):
                yield int((FOLDER / "munge.pid").read_text())

    # ------------------------------------------------------------------------------------------------ what goes wrong

    def fail(self, node: str) -> None:
        """Cut the node off: its processes go on, and nothing that they send arrives."""
        self._require_namespaces()
        _run("ip", "link", "set", _namespace(node), "down")

    def heal(self, node: str) -> None:
        """Connect a node that was cut off."""
        self._require_namespaces()
        _run("ip", "link", "set", _namespace(node), "up")

    def kill(self, node: str) -> None:
        """Power off: every process on the node is gone, and no connection of theirs is closed."""
        if self.namespaces:
            self.fail(node)
        for process in self._processes(node):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def sicken(self, node: str) -> None:
        """Have the prolog of the next job on the node fail."""
        (FOLDER / node / "sick").touch()

    def restart(self, node: str) -> None:
        """Start the node, for the first time or after `kill`."""
        if self.namespaces:
            self.heal(node)
        self._daemon(["slurmd"], node)

    def restore(self) -> None:
        """Cancel all jobs, and make every node well again. Raises ClusterError where that takes too long."""
        ask("scancel", "--state=PENDING", "--user=root")
        ask("scancel", "--user=root")
        for node in self.nodes:
            (FOLDER / node / "sick").unlink(missing_ok=True)
            if self.namespaces:
                self.heal(node)
            if not self._is_on(node):
                self.restart(node)
        ask("scontrol", "update", f"NodeName={','.join(self.nodes)}", "State=RESUME", check=False)
        self.wait_until_idle()

    def _is_on(self, node: str) -> bool:
        try:
            os.kill(int((FOLDER / node / "slurmd.pid").read_text()), 0)
        except (OSError, ValueError):
            return False
        return True

    def _require_namespaces(self) -> None:
        if not self.namespaces:
            raise ClusterError("nodes that share one address cannot be cut off")

    # ------------------------------------------------------------------------------------------------ asking it

    def wait_until_idle(self, seconds: float = 60.0) -> None:
        """Return when every node is idle. Raises ClusterError where that does not come."""
        deadline = time.monotonic() + seconds
        while (states := self.states()) != dict.fromkeys(self.nodes, "idle"):
            if time.monotonic() > deadline:
                raise ClusterError(f"the nodes are not idle: {states}; see {FOLDER}/*.log and {FOLDER}/n*/slurmd.log")
            time.sleep(0.2)

    def states(self) -> dict[str, str]:
        """What SLURM takes each node for; empty as long as it does not answer."""
        found = ask("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %t", check=False)
        return dict(line.split() for line in found.splitlines())


def environment() -> dict[str, str]:
    """What a command of SLURM's needs to find this cluster."""
    return {"SLURM_CONF": str(FOLDER / "slurm.conf")}


def ask(*command: str, check: bool = True, **variables: str) -> str:
    """What a command of SLURM's prints, run in megalite's folder. Raises ClusterError, with its errors, if it fails."""
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment() | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if check and result.returncode:
        raise ClusterError(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout


def require_programs() -> None:
    """Raise ClusterError where this machine cannot run SLURM, saying what it lacks."""
    if os.geteuid() != 0:
        raise ClusterError("a SLURM is started by root: sudo make test-slurm")
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise ClusterError(f"no {', '.join(missing)} here: apt-get install --no-install-recommends {PACKAGES}")


def can_make_namespaces() -> bool:
    """Whether this machine lets us have networks and host names of our own, and join them by a bridge."""
    trial, bridge = "megalite-trial", "megalite-trial0"
    try:
        _run("ip", "netns", "add", trial)
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("nsenter", f"--net=/run/netns/{trial}", "unshare", "--uts", "--mount", "hostname", "trial")
    except (ClusterError, OSError):
        return False
    finally:
        _quietly("ip", "link", "delete", bridge)
        _quietly("ip", "netns", "delete", trial)
    return True


def _namespace(node: str) -> str:
    """The name of a node's network namespace, and of this machine's end of its cable."""
    return f"megalite-{node}"


def _namespaces() -> list[Path]:
    return list(Path("/run/netns").glob("megalite-n*"))


def _has(process: Path, *variables: bytes) -> bool:
    """Whether a process was started with variables; the value of one that ends in `=` does not matter."""
    found = (process / "environ").read_bytes().split(b"\0")
    return all(
        any(each == variable or (variable.endswith(b"=") and each.startswith(variable)) for each in found)
        for variable in variables
    )


def _host_name() -> str:
    return socket.gethostname().partition(".")[0]


def _remove_cgroups() -> None:
    """Of this cluster's nodes, from the innermost out; those of another SLURM are in use and stay."""
    for node in CGROUPS.glob("*/slurm*"):
        if re.fullmatch(r"slurm(_n\d+)?", node.name):
            for folder, _, _ in os.walk(node, topdown=False):
                with suppress(OSError):
                    os.rmdir(folder)


def _run(*command: str, **variables: str) -> None:
    result = subprocess.run(
        command,
        env=os.environ | environment() | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if result.returncode:
        raise ClusterError(f"{' '.join(command)}: {(result.stderr or result.stdout).strip()}")


def _quietly(*command: str) -> None:
    with suppress(ClusterError, OSError):
        _run(*command)


def main() -> None:
    """The command line; see the head of this file."""
    parser = argparse.ArgumentParser(description="A real SLURM on one machine, for tests.")
    parser.add_argument("verb", choices=("up", "down", "fail", "heal", "kill", "restart"))
    parser.add_argument("node", nargs="?", help="n0, n1, ...; with `up`, how many")
    arguments = parser.parse_args()
    if arguments.verb in ("up", "down"):
        cluster = Cluster(int(arguments.node or 4))
        getattr(cluster, arguments.verb)()
    elif arguments.node is None:
        parser.error(f"{arguments.verb} needs a node")
    else:
        getattr(Cluster(), arguments.verb)(arguments.node)


if __name__ == "__main__":
    try:
        main()
    except ClusterError as error:
        raise SystemExit(f"error: {error}") from None

"""A real SLURM of a few nodes on one machine, for tests: `python -m tests.slurm.cluster up`, and then

    export SLURM_CONF=/run/megalite-slurm-0/slurm.conf
    sbatch --nodes=2 --wrap 'srun hostname'
    python -m tests.slurm.cluster fail r0-n1        cut off from the network; heal r0-n1
    python -m tests.slurm.cluster kill r0-n1        power off; restart r0-n1
    python -m tests.slurm.cluster down

A node is a network namespace, with an address on a bridge, and a slurmd in host name and mount namespaces of its own
(its /etc/hosts knows the nodes). Where namespaces are refused, all nodes have the machine's one address, and none can
be cut off. The file system and the processes' numbers are shared. All files are in one folder, and the ports are no
SLURM's usual ones: neither a SLURM that the machine has nor a cluster of another number is disturbed or asked. `down`
leaves nothing behind.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.slurm.configuration import CONFIGURATION, GPUS, PROLOG
from tests.slurm.machine import (
    CGROUPS,
    ClusterError,
    can_make_namespaces,
    host_name,
    in_networks,
    is_alive,
    kill_all,
    remove_cgroups,
    require_programs,
    run,
    run_quietly,
    with_variables,
)

CONTROLLER = "controller"
CPUS, MEGABYTES, GPUS_A_NODE = 4, 8000, 2
SECONDS_TO_NOTICE = 15
"""After which a node that does not answer is down (SlurmdTimeout)."""


class Cluster:
    """A cluster of this machine. A context manager: up on the way in, down on the way out.

    Args:
        size: nodes, named r0-n0, r0-n1, ... in cluster 0.
        namespaces: give each a network of its own; None: where the machine lets us.
        number: of the cluster, below 100; of each number at most one runs.
    """

    def __init__(self, size: int = 4, namespaces: bool | None = None, number: int = 0) -> None:
        self.number = number
        self.nodes = tuple(f"r{number}-n{node}" for node in range(size))
        self.namespaces = can_make_namespaces() if namespaces is None else namespaces
        self.limits_memory = (CGROUPS / "memory" / "memory.limit_in_bytes").exists()
        self.folder = Path(f"/run/megalite-slurm-{number}")
        self.environment = {"SLURM_CONF": f"{self.folder}/slurm.conf"}
        """Environment with which SLURM's commands find this cluster."""
        self._bridge = f"megalite{number}"
        self._owner = self.folder / "owner.pid"

    # ------------------------------------------------------------------------------------------------ up and down

    def up(self) -> None:
        """Start all daemons and wait until every node is idle; what a killed cluster has left is removed.

        Raises ClusterError where something is missing here, or does not come up; nothing is left behind then.
        """
        require_programs()
        if next(self._processes(), None) is not None and not self._is_left_behind():
            down = f"python -m tests.slurm.cluster down {self.number}"
            raise ClusterError(f"another cluster runs as number {self.number} ({down})")
        self.down()
        try:
            self._write_files()
            self._start_munge()
            if self.namespaces:
                self._make_network()
            self.start_controller("-c")
            for node in self.nodes:
                self.restart(node)
            self.wait_until_idle()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End every process of the cluster and of its jobs, and undo all that `up` did; also after half an `up`."""
        kill_all(self._processes)
        for space in self._networks():
            run_quietly("ip", "link", "delete", space.name)  # with the namespace it would go some time later
            run_quietly("ip", "netns", "delete", space.name)
        run_quietly("ip", "link", "delete", self._bridge)
        remove_cgroups(self.nodes)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Cluster:
        self.up()
        self._owner.write_text(str(os.getpid()))
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def _is_left_behind(self) -> bool:
        """Tell whether the program that should stop this cluster has ended; a cluster of the command line has none."""
        return self._owner.exists() and not is_alive(self._owner)

    def _write_files(self) -> None:
        self.folder.mkdir(mode=0o755)
        (self.folder / "state").mkdir()
        for node in self.nodes:
            (self.folder / node / "spool").mkdir(parents=True)
        text = CONFIGURATION.format(
            folder=self.folder,
            controller=CONTROLLER if self.namespaces else host_name(),
            address=self._address(CONTROLLER),
            controller_port=self._port(-2),
            node_port=self._port(-1),
            first_job=1 + 33 * self.number,
            tracking="cgroup" if self.limits_memory else "linuxproc",
            task="cgroup" if self.limits_memory else "none",
            memory="_Memory" if self.limits_memory else "",
            notice=SECONDS_TO_NOTICE,
        )
        (self.folder / "slurm.conf").write_text(text + "".join(map(self._describe, self.nodes)))
        (self.folder / "gres.conf").write_text(GPUS.format(nodes=",".join(self.nodes)))
        if self.limits_memory:
            (self.folder / "cgroup.conf").write_text(
                f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={CGROUPS}\nCgroupAutomount=no\nConstrainRAMSpace=yes\n"
            )
        prolog = self.folder / "prolog"
        prolog.write_text(PROLOG.format(folder=self.folder))
        prolog.chmod(0o755)
        names = (CONTROLLER, *self.nodes)
        own = "".join(f"{self._address(name)} {name}\n" for name in names)
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + own)

    def _describe(self, node: str) -> str:
        """The node's line in slurm.conf."""
        port = self._port(self.nodes.index(node))
        here = "" if self.namespaces else f"NodeHostname={host_name()} Port={port} "
        return (
            f"NodeName={node} NodeAddr={self._address(node)} {here}CPUs={CPUS} Boards=1 SocketsPerBoard=1 "
            f"CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory={MEGABYTES} Gres=gpu:{GPUS_A_NODE} State=UNKNOWN\n"
        )

    def _address(self, name: str) -> str:
        if not self.namespaces:
            return "127.0.0.1"
        return f"10.77.{self.number}.{1 if name == CONTROLLER else 10 + self.nodes.index(name)}"

    def _port(self, place: int) -> int:
        return 26802 + 40 * self.number + place

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in files.items()]
        run("munged", f"--key-file={key}", *options, environment=self._as(CONTROLLER))

    def _make_network(self) -> None:
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "address", "add", f"{self._address(CONTROLLER)}/24", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")
        for node in self.nodes:
            space = _network(node)
            run("ip", "netns", "add", space)
            run("ip", "link", "add", space, "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "link", "set", space, "master", self._bridge, "up")
            run("ip", "-netns", space, "address", "add", f"{self._address(node)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                run("ip", "-netns", space, "link", "set", device, "up")

    def _daemon(self, command: Sequence[str], name: str) -> None:
        """Start a daemon with what makes it the node `name`."""
        if self.namespaces:
            inside = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
            command = ["unshare", "--uts", "--mount", "sh", "-c", inside, f"{self.folder}/hosts", name, *command]
            if name != CONTROLLER:  # not `ip netns exec`, which mounts another /sys, without cgroups
                command = ["nsenter", f"--net=/run/netns/{_network(name)}", *command]
        elif name != CONTROLLER:
            command = [*command, "-N", name]
        run(*command, environment=self._as(name))

    def _as(self, name: str) -> dict[str, str]:
        """The variables by which a daemon of the node `name`, and what it starts, are found."""
        return self.environment | {"MEGALITE_SLURM_NODE": name}

    def _networks(self) -> list[Path]:
        return [path for node in self.nodes if (path := Path("/run/netns") / _network(node)).exists()]

    def _processes(self, node: str = "") -> Iterator[int]:
        """Processes of a node, or of all: in its network, or started with its name, or for a job on it."""
        yield from in_networks(path for path in self._networks() if path.name == _network(node) or not node)
        ours = f"SLURM_CONF={self.environment['SLURM_CONF']}"
        yield from with_variables(ours, f"MEGALITE_SLURM_NODE={node}")
        yield from with_variables(ours, f"SLURMD_NODENAME={node}")

    # ------------------------------------------------------------------------------------------------ what goes wrong

    def fail(self, node: str) -> None:
        """Cut the node off: its processes go on, and nothing that they send arrives."""
        self._require_namespaces()
        run("ip", "link", "set", _network(node), "down")

    def heal(self, node: str) -> None:
        """Connect a node that was cut off."""
        self._require_namespaces()
        run("ip", "link", "set", _network(node), "up")

    def kill(self, node: str) -> None:
        """Power off: every process on the node is gone, and no connection of theirs is closed."""
        if self.namespaces:
            self.fail(node)
        kill_all(lambda: self._processes(node))

    def sicken(self, node: str) -> None:
        """Have the prolog of the next job on the node fail."""
        (self.folder / node / "sick").touch()

    def restart(self, node: str) -> None:
        """Start the node, for the first time or after `kill`."""
        if self.namespaces:
            self.heal(node)
        self._daemon(["slurmd"], node)

    def start_controller(self, *options: str) -> None:
        """Start SLURM's controller; after `scontrol shutdown slurmctld` it knows all that it knew before."""
        self._daemon(["slurmctld", *options], CONTROLLER)

    def restore(self) -> None:
        """Cancel all jobs, and make every node well again. Raises ClusterError where that takes too long."""
        self.ask("scancel", "--state=PENDING", "--user=root")
        self.ask("scancel", "--user=root")
        for node in self.nodes:
            (self.folder / node / "sick").unlink(missing_ok=True)
            if self.namespaces:
                self.heal(node)
            if not is_alive(self.folder / node / "slurmd.pid"):
                self.restart(node)
        self.ask("scontrol", "update", f"NodeName={','.join(self.nodes)}", "State=RESUME", check=False)
        self.ask("scontrol", "reconfigure")  # else SLURM shuns nodes, which a job has lost, as if cores were in use
        self.wait_until_idle()

    def _require_namespaces(self) -> None:
        if not self.namespaces:
            raise ClusterError("nodes that share one address cannot be cut off")

    # ------------------------------------------------------------------------------------------------ asking it

    def ask(self, *command: str, check: bool = True) -> str:
        """Return the output of a SLURM command. Raises ClusterError, with its errors, if it fails."""
        return run(*command, environment=self.environment, check=check)

    def wait_until_idle(self, seconds: float = 90.0) -> None:
        """Return when every node is idle. Raises ClusterError where that does not come."""
        deadline = time.monotonic() + seconds
        while (states := self.states()) != dict.fromkeys(self.nodes, "idle"):
            if time.monotonic() > deadline:
                logs = f"{self.folder}/*.log and {self.folder}/*/slurmd.log"
                raise ClusterError(f"the nodes are not idle: {states}; see {logs}")
            time.sleep(0.2)

    def states(self) -> dict[str, str]:
        """Return the state of each node according to SLURM; empty as long as SLURM does not answer."""
        found = self.ask("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %t", check=False)
        return dict(line.split() for line in found.splitlines())


def _network(node: str) -> str:
    """The name of a node's network namespace, and of this machine's end of its cable."""
    return f"megalite-{node}"


def main() -> None:
    """The command line; see the head of this file."""
    parser = argparse.ArgumentParser(description="A real SLURM on one machine, for tests.")
    parser.add_argument("verb", choices=("up", "down", "fail", "heal", "kill", "restart"))
    parser.add_argument("name", nargs="?", default="0", help="a node; with `up` and `down`, the number of the cluster")
    arguments = parser.parse_args()
    whole = arguments.verb in ("up", "down")
    cluster = Cluster(number=int(arguments.name if whole else arguments.name.lstrip("r").partition("-")[0]))
    getattr(cluster, arguments.verb)(*() if whole else (arguments.name,))


if __name__ == "__main__":
    try:
        main()
    except ClusterError as error:
        raise SystemExit(f"error: {error}") from None

"""The cluster itself: it runs jobs on each of its nodes, and leaves the machine as it was."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import submit
from tests.slurm.machine import CGROUPS, ClusterError, can_make_namespaces, kill_all, with_variables

pytestmark = pytest.mark.slurm


@pytest.fixture
def number(worker: int) -> int:
    """Return the number of a second cluster, in addition to the one of the other tests."""
    return worker + 50


def traces(number: int) -> list[object]:
    """All that a cluster may change on the machine."""
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    environments = [_environment(process) for process in Path("/proc").glob("[0-9]*/environ")]
    folder = Path(f"/run/megalite-slurm-{number}")
    return [
        [
            name
            for line in links.splitlines()
            if f"megalite{number}" in (name := line.split()[0]) or f"r{number}-" in name
        ],
        list(Path("/run/netns").glob(f"*r{number}-*")),
        list(CGROUPS.glob(f"*/slurm*r{number}-*")),
        sorted(Path("/etc/slurm").rglob("*")),
        Path("/etc/hosts").read_text(),
        folder.exists(),
        sum(bytes(folder) in environment for environment in environments),
    ]


def _environment(path: Path) -> bytes:
    """Return what the file holds; nothing if its process has ended, or is not ours to read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("namespaces", [True, False], ids=["networks", "one address"])
def test_a_cluster_runs_jobs_and_leaves_nothing_behind(namespaces: bool, number: int, tmp_path: Path) -> None:
    if namespaces and not can_make_namespaces():
        pytest.skip("this machine refuses namespaces")
    before = traces(number)
    with Cluster(namespaces=namespaces, number=number) as cluster:
        command = "--wrap=srun --ntasks-per-node=1 sh -c 'echo $SLURMD_NODENAME $(hostname)'"
        job = submit(cluster, "--nodes=4", command, directory=tmp_path)
        job.wait()
        nodes, hosts = zip(*(line.split() for line in job.log.splitlines()), strict=True)
        assert sorted(nodes) == list(cluster.nodes)
        assert (nodes == hosts) == namespaces
        endless = submit(cluster, "--nodes=2", "--wrap=srun sleep 10000", directory=tmp_path)
        endless.until(lambda: endless.state == "RUNNING")
        with pytest.raises(ClusterError, match="another cluster runs"):
            Cluster(number=number).up()
        assert traces(number) != before
    assert traces(number) == before


@pytest.mark.parametrize("daemons", ["killed, too", "left"])
def test_a_cluster_takes_the_place_of_one_whose_program_was_killed(daemons: str, number: int) -> None:
    before = traces(number)
    left = Cluster(number=number)
    killed = subprocess.Popen(["true"])
    killed.wait()
    left.up()
    (left.folder / "owner.pid").write_text(str(killed.pid))
    if daemons != "left":
        kill_all(lambda: with_variables(f"SLURM_CONF={left.environment['SLURM_CONF']}"))
    assert traces(number) != before
    with Cluster(number=number):
        pass
    assert traces(number) == before


def test_a_cluster_that_does_not_come_up_leaves_nothing_behind(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = traces(number)

    def fail(cluster: Cluster) -> None:
        raise ClusterError("a node is not idle")

    monkeypatch.setattr(Cluster, "wait_until_idle", fail)
    with pytest.raises(ClusterError, match="not idle"):
        Cluster(number=number).up()
    assert traces(number) == before

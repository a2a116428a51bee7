"""Loss of network or power of a node, as the run itself detects it: nothing closes the connections."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from queue import SimpleQueue

import pytest

from megalite.process.place import Place
from megalite.watchdog import link
from megalite.watchdog.link import Peer
from megalite.watchdog.monitor import Monitor
from megalite.watchdog.secret import Secret
from megalite.watchdog.sections import Limits
from tests.slurm.cluster import CONTROLLER, Cluster
from tests.slurm.jobs import ROOT

pytestmark = pytest.mark.slurm

RANK_1 = """
import os, sys, time
from dataclasses import asdict
from megalite.watchdog.link import connect
from megalite.watchdog.link import Peer

link = connect(sys.argv[1], int(sys.argv[2]), b"secret", 30.0)
link.send(**asdict(Peer(1, "far", os.getpid(), 1, "another machine")))
while True:
    link.send(section="optimizer", step=7)
    time.sleep(0.1)
"""


def test_a_rank_that_is_cut_off_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    if not cluster.namespaces:
        pytest.skip("nodes that share one address cannot be cut off")
    monkeypatch.setattr(link, "UNREACHABLE_SECONDS", 2.0)
    told: SimpleQueue[str] = SimpleQueue()

    def report(message: str, code: int) -> int:
        told.put(message)
        return code

    node = cluster.nodes[1]
    place = Place(0, 0, 2, host=cluster._address(CONTROLLER))
    monitor = Monitor(Peer(0, "near", os.getpid(), 1, "this machine"), place, Secret(b"secret"), Limits(), report, None)
    monitor.start()
    inside = ["nsenter", f"--net=/run/netns/megalite-{node}", sys.executable, "-c", RANK_1]
    with subprocess.Popen([*inside, *map(str, monitor.address)], cwd=ROOT) as rank:
        try:
            while monitor._missing != {0}:
                assert rank.poll() is None
                time.sleep(0.05)
            time.sleep(0.5)
            cluster.fail(node)
            assert told.get(timeout=60).startswith(
                f"rank 1 (process {rank.pid} on far) has ended without a message, last seen in step 7"
            )
        finally:
            rank.kill()
            monitor.close()

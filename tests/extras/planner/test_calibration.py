"""Calibration of the planner's constants: the fit, the file, and a prediction on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megalite.extras.planner import calibration
from megalite.extras.planner.calibration import as_toml, calibrate, nonnegative_least_squares
from megalite.extras.planner.cluster import find_cluster


def test_least_squares_leave_out_what_would_be_negative() -> None:
    table = np.random.default_rng(0).random((12, 3))
    assert nonnegative_least_squares(table, table @ [2.0, 0.5, 1.0]) == pytest.approx([2.0, 0.5, 1.0])
    found = nonnegative_least_squares(table, table @ [2.0, -0.5, 1.0])
    assert found[1] == 0.0
    assert min(found) >= 0.0


def test_a_cluster_is_written_as_it_is_read(tmp_path: Path) -> None:
    for name in ("cpu", "H100-SXM", "selene", "GB200"):
        cluster = find_cluster(name)
        path = tmp_path / f"{name}.toml"
        path.write_text(as_toml(cluster, "a test"))
        found = find_cluster(str(path))
        assert found.gpu.peak == pytest.approx(cluster.gpu.peak)
        assert found.gpu.generation == cluster.gpu.generation
        assert (found.node_ranks, found.nodes, found.hosts) == (cluster.node_ranks, cluster.nodes, cluster.hosts)
        for field in ("node", "network"):
            assert vars(getattr(found, field)) == pytest.approx(vars(getattr(cluster, field)))
        for field in ("memory", "reserved", "bandwidth", "efficiency", "half", "share", "kernel", "launch"):
            assert getattr(found.gpu, field) == pytest.approx(getattr(cluster.gpu, field))


def test_the_kernel_of_attention_that_is_timed_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are as much faster or slower than it as they are known to be."""
    monkeypatch.setattr(calibration, "_products", lambda *_: {})
    monkeypatch.setattr(calibration, "_elementwise", lambda *_: (1e-6, 0.8))
    monkeypatch.setattr(calibration, "_attention", lambda *_: (0.25, "flash-2"))
    monkeypatch.setattr(calibration, "_by_steps", lambda cluster: cluster.gpu)
    known = find_cluster("H100-SXM")
    found, before = calibrate(known).gpu.attention, known.gpu.attention
    assert found["flash-2"] == pytest.approx(0.25)
    assert found["cudnn"] / found["flash-2"] == pytest.approx(before["cudnn"] / before["flash-2"])


@pytest.mark.wide
@pytest.mark.costly
def test_constants_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coarse calibration of seconds: a machine that seems ten times as fast finds the same constants."""
    monkeypatch.setattr(calibration, "PRODUCT_SECONDS", 0.5)
    monkeypatch.setattr(calibration, "_NETWORKS", ((2, 64, 32, 2), (2, 64, 128, 2), (2, 128, 64, 2), (1, 128, 128, 2)))
    cpu = find_cluster("cpu")
    fast = replace(cpu, gpu=replace(cpu.gpu, peak={name: 10 * peak for name, peak in cpu.gpu.peak.items()}))
    one, other = calibrate(cpu).gpu, calibrate(fast).gpu
    # Other programs run on this machine, too: a factor of two is no tenfold.
    assert 0.5 < one.peak["float32"] / other.peak["float32"] < 2
    assert one.launch == 0.0
    assert one.kernel > 0

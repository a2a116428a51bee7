"""Clusters: the table of the project, files of users, measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalite.errors import ConfigurationError
from megalite.extras.planner.calibration import as_toml
from megalite.extras.planner.cluster import Host, find_cluster, find_stack, with_doctor

FILE = """
nodes = 4

[gpu]
name = "mine"
memory = 80e9
reserved = 1e9
bandwidth = 2e12
efficiency = 0.8
half = 100
share = 0.8
kernel = 3e-6
launch = 1e-5
peak = { float32 = 2e13, bfloat16 = 3e14 }
attention = { flash-2 = 0.6 }

[node]
ranks = 8
alpha = 3e-6
beta = 4e-12

[network]
alpha = 8e-6
beta = 4e-11
"""


def written(folder: Path, text: str) -> str:
    path = folder / "cluster.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", ["A100-SXM-40GB", "H100-SXM", "B200", "GB300", "L40S", "RTX-4090", "MI300X", "cpu"])
def test_known_gpus_are_complete(name: str) -> None:
    cluster = find_cluster(name)
    assert cluster.gpu.name == name
    assert cluster.gpu.memory > cluster.gpu.reserved
    assert cluster.nodes is None
    assert cluster.node.beta <= cluster.network.beta


def test_named_cluster_has_nodes_and_its_own_network() -> None:
    cluster = find_cluster("jean-zay")
    assert cluster.gpu == find_cluster("A100-SXM-80GB").gpu
    assert cluster.nodes == 52
    assert cluster.network.beta > find_cluster("A100-SXM-80GB").network.beta


def test_rack_is_one_domain() -> None:
    assert find_cluster("GB200").node_ranks == 72


@pytest.mark.parametrize(("gpus", "per_host"), [(4, 4), (8, 8), (12, 6), (16, 8), (13, 1)])
def test_hosts_have_equal_numbers_of_ranks(gpus: int, per_host: int) -> None:
    assert find_cluster("H100-SXM").per_host(gpus) == per_host


def test_file_of_a_user(tmp_path: Path) -> None:
    cluster = find_cluster(written(tmp_path, FILE))
    assert cluster.gpu.name == "mine"
    assert (cluster.nodes, cluster.node_ranks) == (4, 8)
    assert cluster.network.beta == 4e-11
    assert cluster.gpu.peak_of("bfloat16") == 3e14
    assert cluster.gpu.peak_of("float64") == 2e13


def test_file_may_name_a_gpu(tmp_path: Path) -> None:
    cluster = find_cluster(written(tmp_path, 'gpu = "H100-SXM"\nnetwork = { alpha = 1e-5, beta = 1e-10 }\n'))
    assert cluster.gpu == find_cluster("H100-SXM").gpu
    assert cluster.network.beta == 1e-10
    assert cluster.node == find_cluster("H100-SXM").node


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("beta = 4e-11\n", "", ["network.beta", "missing"]),
        ("[network]\nalpha = 8e-6\nbeta = 4e-11\n", "", ["network", "missing", "beta"]),
        ("beta = 4e-12", "beta = 0", ["node.beta", "above 0"]),
        ("beta = 4e-12", 'beta = "fast"', ["node.beta", "fast", "number"]),
        ("alpha = 3e-6", "alpha = -1", ["node.alpha", "-1"]),
        ("nodes = 4", "racks = 4", ["racks", "unknown"]),
        ('name = "mine"', "generation = 9", ["gpu.generation", "9", "'Hopper'"]),
        ("half = 100\n", "", ["gpu.half", "missing"]),
        ("half = 100\n", "half = nan\n", ["gpu.half", "nan"]),
        ("float32 = 2e13, ", "", ["gpu.peak", "float32"]),
        ("[node]", "[node", ["TOML"]),
        ("ranks = 8", "ranks = 0.5", ["node.ranks", "0.5", "whole number"]),
        ("nodes = 4", "nodes = 1.5", ["nodes", "1.5", "whole number"]),
        ("ranks = 8", "ranks = 8\nhosts = 3", ["node.hosts", "3", "divisor of node.ranks, 8"]),
    ],
)
def test_mistakes_of_a_file_are_one_line(tmp_path: Path, before: str, after: str, words: list[str]) -> None:
    assert before in FILE
    path = written(tmp_path, FILE.replace(before, after, 1))
    with pytest.raises(ConfigurationError) as raised:
        find_cluster(path)
    message = str(raised.value)
    assert "\n" not in message
    assert all(word in message for word in [path, *words])


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="A100-SXM-80GB"):
        find_cluster("A100")
    with pytest.raises(ConfigurationError, match="megatron-core"):
        find_stack("megatron")


def test_megalite_is_a_stack_without_a_number() -> None:
    assert find_stack("megalite").factor == 1.0


def figure(scope: str, operation: str, ranks: int, alpha: float, beta: float) -> dict[str, Any]:
    return {"scope": scope, "operation": operation, "ranks": ranks, "line": {"alpha": alpha, "beta": beta}}


def test_doctor_gives_links() -> None:
    found = {
        "nodes": {"a": {"ranks": [0, 1, 2, 3]}, "b": {"ranks": [4, 5, 6, 7]}},
        "timings": [
            figure("within a node", "all-reduce", 4, 6e-5, 3e-12),
            figure("within a node", "all-to-all", 4, 6e-5, 9e-12),
            figure("across nodes", "point to point", 2, 2e-5, 5e-11),
        ],
    }
    cluster = with_doctor(find_cluster("A100-SXM-80GB"), found)
    assert cluster.node_ranks == 4
    assert cluster.node.alpha == pytest.approx(1e-5)  # six steps
    assert cluster.node.beta == pytest.approx(2e-12)  # one and a half times the bytes
    assert (cluster.network.alpha, cluster.network.beta) == (2e-5, 5e-11)


def test_doctor_without_timings_changes_nothing() -> None:
    cluster = find_cluster("A100-SXM-80GB")
    assert with_doctor(cluster, {"nodes": {}, "timings": []}) == cluster


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 1}, "all-reduce within a node.ranks is 1: "),
        ({"ranks": "8"}, "all-reduce within a node.ranks is '8': "),
        ({"line": {"alpha": -1e-6, "beta": 1e-12}}, "all-reduce within a node.alpha is -1e-06: "),
        ({"line": {"alpha": 1e-6, "beta": -1e-12}}, "all-reduce within a node.beta is -1e-12: "),
        ({"line": [1e-6]}, "not a file of doctor"),
    ],
)
def test_doctors_figures_must_be_possible(changes: dict[str, Any], words: str) -> None:
    found = {"nodes": {}, "timings": [figure("within a node", "all-reduce", 4, 1e-6, 1e-12) | changes]}
    with pytest.raises(ConfigurationError) as raised:
        with_doctor(find_cluster("A100-SXM-80GB"), found)
    assert words in str(raised.value)


def test_times_that_do_not_grow_with_the_bytes_say_nothing_of_a_link() -> None:
    cluster = find_cluster("A100-SXM-80GB")
    found = {"nodes": {}, "timings": [figure("across nodes", "all-reduce", 4, 1e-6, 0.0)]}
    assert with_doctor(cluster, found) == cluster


def test_file_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="doctor"):
        with_doctor(find_cluster("A100-SXM-80GB"), {"timings": [{}]})


HOST = "\n[host]\nmemory = 1e11\nbandwidth = 5e10\nbeta = 2e-11\n"


def test_a_host_may_be_known(tmp_path: Path) -> None:
    found = find_cluster(written(tmp_path, FILE + HOST))
    assert found.known_host == Host(memory=1e11, bandwidth=5e10, beta=2e-11)
    assert find_cluster(written(tmp_path, as_toml(found, "again"))).host == found.host
    with pytest.raises(ConfigurationError, match=r"nothing is known of the hosts of --cluster cluster: give a file"):
        _ = find_cluster(written(tmp_path, FILE)).known_host
    with pytest.raises(ConfigurationError, match=r"host\.beta is missing"):
        find_cluster(written(tmp_path, FILE + HOST.replace("beta = 2e-11", "")))
    with pytest.raises(ConfigurationError, match=r"host: 'alpha' is unknown"):
        find_cluster(written(tmp_path, f"{FILE}{HOST}alpha = 1\n"))

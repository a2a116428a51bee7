"""The parts of tools/doctor.py by themselves: a node alone, with an nvidia-smi that is told what to say; the network's
clocks; the line through timings; and what is made of what nodes have seen."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import DataConfig
from megalite.errors import CommunicationError, ConfigurationError
from megalite.extras.doctor import consistency, network, node
from megalite.extras.doctor.bandwidth import (
    ACROSS,
    POINT_TO_POINT,
    WITHIN,
    Timing,
    bus_factor,
    fit,
    ring_pairs,
    slow_nodes,
)
from megalite.extras.doctor.commands import doctor
from megalite.extras.doctor.consistency import examine_data
from megalite.extras.doctor.findings import SMALLEST, Finding, Options, Verdict
from megalite.extras.doctor.judgement import show
from megalite.extras.doctor.network import Listener, Reached, examine_network, own_address, reach, reach_all
from megalite.extras.doctor.reports import Found, Report, Roll
from megalite.extras.doctor.roll_call import RollCall
from megalite.extras.doctor.run_directory import Seen, examine_run_directory
from megalite.process.place import Place

ROOT = Path(__file__).parents[3]

# ---------------------------------------------------------------------------------------------------- a node alone

NAMES = "{0}, GPU-{0}, NVIDIA H100 80GB HBM3, 550.90.07, 0, [N/A]\n"
CLOCKS = "{0}, Not Active, Not Active, Not Active, Not Active\n"
REMAPPED = "GPU-{0}, 0, 0\n"
LINKS = "GPU {0}: NVIDIA H100 80GB HBM3 (UUID: GPU-{0})\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"


def two(line: str) -> str:
    return line.format(0) + line.format(1)


WELL = {
    "--query-gpu=index,uuid": two(NAMES),
    "--query-gpu=index,clocks_event": two(CLOCKS),
    "--query-remapped-rows": two(REMAPPED),
    "nvlink": two(LINKS),
}


def smi(answers: Mapping[str, str], folder: Path) -> Path:
    """A folder with an nvidia-smi that answers questions by how they begin, and says of others what the real one says.

    An answer that begins with ! is a line of the shell.
    """
    cases = [
        f"{shlex.quote(question)}*) {answer[1:] if answer.startswith('!') else 'printf %s ' + shlex.quote(answer)} ;;"
        for question, answer in answers.items()
    ]
    script = folder / "nvidia-smi"
    other = "*) echo 'Field \"x\" is not a valid field to query.'; exit 2 ;;"
    script.write_text("\n".join(["#!/bin/sh", 'case "$1" in', *cases, other, "esac", ""]))
    script.chmod(0o755)
    return folder


@dataclass(frozen=True)
class Told:
    code: int
    stdout: str
    stderr: str


Alone = Callable[..., Told]


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Alone:
    """`tools/doctor.py --node` on a node with memory to share, where nvidia-smi gives these answers."""
    usage = shutil.disk_usage(tmp_path)._replace(free=2**31)
    monkeypatch.setattr(node.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    path = os.environ["PATH"]

    def run(answers: Mapping[str, str], *flags: str) -> Told:
        monkeypatch.setenv("PATH", f"{smi(answers, tmp_path)}:{path}")
        monkeypatch.setattr(sys, "argv", ["doctor.py", "--node", *flags])
        return Told(doctor.main(), *capsys.readouterr())

    return run


def test_a_node_that_is_well_says_so_in_a_line(alone: Alone, tmp_path: Path) -> None:
    assert alone(WELL, "--gpus", "2", "--json", str(tmp_path / "node.json")) == Told(0, "node n7: well\n", "")
    found = json.loads((tmp_path / "node.json").read_text())
    assert found["gpus"] == ["NVIDIA H100 80GB HBM3"] * 2
    assert found["driver"] == "550.90.07"


GPUS, CLOCKED, ROWS = "--query-gpu=index,uuid", "--query-gpu=index,clocks_event", "--query-remapped-rows"
TROUBLES = {  # question, answer, severity, what is told
    "ECC": (GPUS, two(NAMES).replace(" 0, [N/A]\n", " 3, [N/A]\n", 1), "sick", "GPU 0 has had 3 uncorrectable"),
    "page": (GPUS, two(NAMES).replace("[N/A]", "Yes", 1), "sick", "GPU 0 waits to retire a page"),
    "one lost": (GPUS, NAMES.format(0), "sick", "1 GPUs are there, and 2 are expected"),
    "all lost": (GPUS, "!echo No devices were found; exit 6", "sick", "0 GPUs are there, and 2 are expected"),
    "fails": (GPUS, "!echo GPU is lost; exit 15", "sick", "nvidia-smi fails: GPU is lost"),
    "hot": (CLOCKED, "0, Active, Not Active, Not Active, Active", "sick", "GPU 0 is slowed down because it is too hot"),
    "power": (CLOCKED, "0, Not Active, Active, Not Active, Active", "sick", "power brake"),
    "warm": (CLOCKED, "0, Not Active, Not Active, Active, Not Active", "warning", "because it is hot"),
    "slow": (CLOCKED, "0, Not Active, Not Active, Not Active, Active", "warning", "by its hardware"),
    "row": (ROWS, "GPU-1, 1, 0", "sick", "GPU 1 waits to remap a row"),
    "no rows": (ROWS, "GPU-1, No, Yes", "sick", "GPU 1 has no spare row left"),
    "link": ("nvlink", two(LINKS).replace("26.562 GB/s", "<inactive>", 1), "sick", "GPU 0 has 1 active NVLinks"),
    "no link": ("nvlink", two(LINKS).replace("26.562 GB/s", "<inactive>", 2), "warning", "GPU 0 has no active NVLink"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_what_is_wrong_with_a_gpu_is_told(trouble: str, alone: Alone) -> None:
    question, answer, severity, text = TROUBLES[trouble]
    told = alone(WELL | {question: answer}, "--gpus", "2")
    assert told.code == (93 if severity == "sick" else 0)
    line = told.stderr if severity == "sick" else told.stdout
    assert line.startswith(f"node n7: {severity}: ")
    assert text in line
    assert line.count("sick") + line.count("warning") == line.count("\n") == 1


def test_older_drivers_and_gpus_without_ecc_or_links_are_well(alone: Alone) -> None:
    older = {GPUS: "0, GPU-0, GTX 1080, 470.1, [N/A], [N/A]\n"}
    assert alone(older).code == 0
    clocks = "0, Not Active, Active, Not Active, Active\n"
    assert "power brake" in alone(older | {CLOCKED.replace("event", "throttle"): clocks}).stderr


def test_slurm_says_how_many_gpus_there_must_be(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert "2 GPUs are there, and 8 are expected" in alone(WELL).stderr
    assert alone(WELL, "--gpus", "2").code == 0


def test_little_shared_memory_is_told_where_there_are_gpus(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    little = shutil.disk_usage("/")._replace(free=64 * 2**20)
    monkeypatch.setattr(node.shutil, "disk_usage", lambda path: little)
    assert "warning: /dev/shm has 64 MiB free" in alone(WELL).stdout
    assert alone({GPUS: NAMES.format(0)}).stdout == "node n7: well\n"


def test_flags_that_make_no_sense_are_refused(alone: Alone) -> None:
    with pytest.raises(ConfigurationError, match="--node checks a node without a run: leave --lr out"):
        alone(WELL, "--lr", "1")
    with pytest.raises(ConfigurationError, match="--gpus -1: must be at least 0"):
        alone(WELL, "--gpus", "-1")
    with pytest.raises(ConfigurationError, match="--max-bytes 100: must be at least 1024, or 0 to time none"):
        alone(WELL, "--max-bytes", "100")
    with pytest.raises(ConfigurationError, match="--patience 'inf': expected a finite number"):
        alone(WELL, "--patience", "inf")


def test_a_node_is_looked_at_without_torch_and_its_limit_of_open_files_too() -> None:
    look = "import sys; from megalite.extras.doctor.commands import doctor; sys.argv[1:] = ['--node']; "
    python = [sys.executable, "-c", look + "code = doctor.main(); assert 'torch' not in sys.modules; sys.exit(code)"]
    command = ["sh", "-c", f"ulimit -S -n 256; exec {shlex.join(python)}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 93
    assert "a process may open 256 files, and a run needs about 516" in done.stderr


def test_a_driver_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = WELL | {"--query-remapped-rows": "!sleep 1000"}
    monkeypatch.setenv("PATH", f"{smi(answers, tmp_path)}:{os.environ['PATH']}")
    monkeypatch.setattr(node, "SECONDS", 0.5)
    start = time.monotonic()
    _, (finding,) = node.examine_gpus(2)
    assert finding == Finding("sick", "nvidia-smi does not answer within 0.5 seconds: the driver, or a GPU, hangs")
    assert time.monotonic() - start < 60


# ---------------------------------------------------------------------------------------------------- the network


def test_a_clock_that_is_ahead_is_found_and_told_of() -> None:
    with Listener("127.0.0.1", "token", clock=lambda: time.time() - 100) as listener:
        reached = reach("127.0.0.1", listener.port, "token")
    assert not reached.problem
    assert abs(reached.clock + 100) < 1.0
    addresses = {"n0": ("127.0.0.1", 1), "n1": ("127.0.0.1", 2)}
    (finding,) = examine_network({"n0": {"n1": Reached()}, "n1": {"n0": reached}}, addresses, "n0")
    assert finding == Finding("warning", "its clock is 100.0 seconds ahead of that of n0", "n1")


def test_somebody_else_at_a_port_is_not_the_node() -> None:
    with Listener("127.0.0.1", "token") as listener:
        assert reach("127.0.0.1", listener.port, "other").problem
        reached = reach_all({"a": ("127.0.0.1", listener.port), "b": ("", 0)}, "b", "token")
    assert list(reached) == ["a"]
    assert not reached["a"].problem


def test_a_node_that_none_reaches_is_to_be_dropped_and_a_broken_pair_is_not() -> None:
    nodes = ("n0", "n1", "n2", "n3")
    addresses = dict.fromkeys(nodes, ("10.0.0.1", 5))
    cut = Reached("timed out")

    def seen(broken: Callable[[str, str], bool]) -> dict[str, dict[str, Reached]]:
        return {a: {b: cut if broken(a, b) else Reached() for b in nodes if b != a} for a in nodes}

    (alone,) = examine_network(seen(lambda a, b: "n2" in (a, b)), addresses, "n0")
    assert alone.node == "n2"
    assert "3 of 3 nodes" in alone.text
    (nobody,) = examine_network(seen(lambda a, b: True), addresses, "n0")
    assert nobody.node is None
    (one_way,) = examine_network(seen(lambda a, b: (a, b) == ("n2", "n1")), addresses, "n0")
    assert one_way.node is None
    assert one_way.text.startswith("n2 does not reach n1 at 10.0.0.1 (timed out): open the ports")
    (both_ways,) = examine_network(seen(lambda a, b: {a, b} == {"n2", "n1"}), addresses, "n0")
    assert both_ways.text.startswith("n1 does not reach n2 at 10.0.0.1, nor n2 n1 (timed out)")


def test_the_interface_is_the_one_that_the_backend_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")
    assert own_address("gloo", "localhost") == own_address("nccl", "localhost") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nothing")
    for backend in ("gloo", "nccl"):
        with pytest.raises(OSError, match="nothing"):
            own_address(backend, "localhost")


@pytest.mark.parametrize(
    ("wanted", "interface", "taken"),
    [("eth", "eth1", True), ("=eth", "eth1", False), ("=eth1", "eth1", True), ("^docker,lo", "eth0", True),
     ("^docker,lo", "docker0", False), ("ib,eth", "eth0", True), ("ib", "eth0", False), ("^=eth0", "eth00", True)],
)  # fmt: skip
def test_names_of_interfaces_mean_what_they_mean_to_nccl(wanted: str, interface: str, taken: bool) -> None:
    assert network.chooses(wanted, interface) == taken


# ---------------------------------------------------------------------------------------------------- figures


@given(
    alpha=st.floats(1e-7, 1e-2),
    bandwidth=st.floats(1e6, 1e12),
    count=st.integers(2, 10),
)
def test_the_line_through_timings_is_found(alpha: float, bandwidth: float, count: int) -> None:
    sizes = [SMALLEST * 4**power for power in range(count)]
    line = fit({size: alpha + size / bandwidth for size in sizes})
    for size in sizes:
        assert line.alpha + line.beta * size == pytest.approx(alpha + size / bandwidth, rel=1e-6)
    if sizes[0] / bandwidth < alpha < sizes[-1] / bandwidth:  # else one of the two hardly shows
        assert line.alpha == pytest.approx(alpha, rel=1e-4)
        assert 1 / line.beta == pytest.approx(bandwidth, rel=1e-4)


def test_a_small_message_counts_as_much_as_a_large_one() -> None:
    assert fit({1024: 1e-5, 2048: 1e-5, 2**28: 0.25, 2**30: 1.1}).alpha == pytest.approx(1e-5, rel=0.2)


@given(st.dictionaries(st.integers(1, 10**9), st.floats(1e-6, 10.0), min_size=2))
def test_no_line_has_a_time_below_zero(points: dict[int, float]) -> None:
    line = fit(points)
    assert line.alpha >= 0
    assert line.beta >= 0


def test_the_bus_moves_what_nccl_tests_says_it_does() -> None:
    assert bus_factor("all-reduce", 8) == 2 * 7 / 8
    assert bus_factor("all-gather", 8) == bus_factor("reduce-scatter", 8) == bus_factor("all-to-all", 8) == 7 / 8
    assert bus_factor(POINT_TO_POINT, 8) == 1


@pytest.mark.parametrize("size", range(2, 10))
def test_neighbours_in_a_ring_talk_to_one_at_a_time_and_each_pair_does_once(size: int) -> None:
    pairs = ring_pairs(size)
    rounds: list[set[int]] = [set()]
    for pair in pairs:
        if rounds[-1].intersection(pair):
            rounds.append(set())
        rounds[-1].update(pair)
    assert len(rounds) == (1 if size == 2 else 2 + size % 2)
    expected = {frozenset((at, (at + 1) % size)) for at in range(size)}
    assert sorted(map(sorted, expected)) == sorted(map(sorted, pairs))


@pytest.mark.parametrize(("largest", "bandwidths"), [(2**20, ["2", "3"]), (2**16, [])])
def test_the_table_has_what_was_fitted_and_no_bandwidth_that_is_noise(
    largest: int, bandwidths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    timings = [Timing(WITHIN, "all-reduce", size, (0,), 1e-4 + size / 2e9) for size in (4096, largest)]
    roll, reports = Roll({"n0": [0, 1, 2, 3]}, "", None), {0: Report({"software": {}}, "")}
    show(Found(Place(0, 0, 4), "gloo", Options(), None, roll, [], reports, timings=timings), Verdict([]))
    out = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split()[-2:] for line in out.splitlines()}
    assert rows["4 KiB"] == ["102", "µs"]
    assert rows["alpha"] == ["100", "µs"]
    assert [line.split()[-2] for line in out.splitlines() if "GB/s" in line] == bandwidths


def test_a_slow_node_is_named_and_its_neighbours_are_not() -> None:
    nodes = {"n0": [0], "n1": [1], "n2": [2], "n3": [3]}
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    timings = [Timing(ACROSS, POINT_TO_POINT, 4096, pair, 2.0 if 2 in pair else 1.0) for pair in ring]
    (slow,) = slow_nodes(timings, nodes)
    assert (slow.severity, slow.node) == ("warning", "n2")
    assert not list(slow_nodes([t for t in timings if set(t.ranks) <= {1, 2}], nodes))  # of two, either may be


def test_within_nodes_the_largest_size_counts() -> None:
    nodes = {"n0": [0, 1], "n1": [2, 3], "n2": [4, 5]}
    timings = [
        Timing(WITHIN, "all-reduce", size, (first,), 3.0 if (size, first) in ((1024, 0), (4096, 4)) else 1.0)
        for size in (1024, 4096)
        for first in (0, 2, 4)
    ]
    assert [finding.node for finding in slow_nodes(timings, nodes)] == ["n2"]


# ---------------------------------------------------------------------------------------------------- what it comes to


def test_a_directory_that_only_rank_0_sees_is_no_nodes_fault() -> None:
    seen = {"n0": Seen(True, 100), "n1": Seen(False), "n2": Seen(False)}
    (finding,) = examine_run_directory("/run", seen, 1, 3)
    assert (finding.severity, finding.node) == ("wrong", None)
    (finding,) = examine_run_directory("/run", seen | {"n1": Seen(True, 100)}, 1, 3)
    assert (finding.severity, finding.node) == ("sick", "n2")


def test_there_must_be_room_on_the_node_that_has_least_and_leave_to_write() -> None:
    seen = {"n0": Seen(True, 400), "n1": Seen(True, 299)}
    (finding,) = examine_run_directory("/run", seen, 100, 3)
    assert "has 299 B free, and 3 checkpoints take 300 B" in finding.text
    assert not list(examine_run_directory("/run", seen, 99, 3))
    (finding,) = examine_run_directory("/run", {"n0": Seen(True, 1), "n1": Seen(True, problem="denied")}, None, 3)
    assert (finding.node, finding.text) == ("n1", "--save /run cannot be written to: denied")


def test_data_that_differ_near_their_end_are_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "_END", 16)
    data = DataConfig(seq_length=8, train_data_path=(str(tmp_path / "a"),))
    prints = []
    for end in (b"1", b"2"):
        (tmp_path / "a.bin").write_bytes(bytes(100) + end)
        prints.append(consistency.fingerprints(data))
    assert prints[0][str(tmp_path / "a.idx")] == "missing"
    (finding,) = (each for each in examine_data({"n0": prints[0], "n1": prints[1]}) if each.node)
    assert finding.node == "n1"


def test_the_file_in_the_folder_of_a_tokenizer_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    data = DataConfig(seq_length=8, mock_data=True, tokenizer_model=str(tmp_path))
    ((path, found),) = consistency.fingerprints(data).items()
    assert path == str(tmp_path / "tokenizer.json")
    assert found.startswith("of 2 bytes")


def test_data_that_no_node_has_is_no_nodes_fault() -> None:
    (finding,) = examine_data({"n0": {"a.bin": "missing"}, "n1": {"a.bin": "missing"}})
    assert (finding.severity, finding.node, finding.text) == ("wrong", None, "a.bin is missing on all nodes")


def test_the_verdict_says_what_to_do() -> None:
    sick, wrong = Finding("sick", "hot", "n1"), Finding("wrong", "no data")
    assert Verdict([]).lines() == ["verdict: well"]
    assert Verdict([Finding("warning", "late", "n0")]).lines()[-1] == "verdict: well, with 1 warning"
    assert Verdict([sick, sick]).lines() == ["sick: node n1: hot", "verdict: drop node n1"]
    assert Verdict([sick, wrong]).lines()[-1] == "verdict: drop node n1, and repair the rest"
    assert Verdict([wrong]).lines()[-1] == "verdict: a run would fail, and not because of one node"
    codes = [Verdict(findings).exit_code for findings in ([], [wrong], [wrong, sick])]
    assert codes == [0, 64, 93]


# ------------------------------------------------------------------------------------------------------ the roll call


@pytest.mark.parametrize("written", [b"", b"\xff", b"[" * 100_000, b"9" * 6000])
def test_what_a_stranger_has_put_into_the_store_is_told(written: bytes) -> None:
    call = RollCall(Place(0, 0, 1), 1.0, lambda: False)
    call._mailbox.store.set("roll", written)
    told = "something that is not a rank has written to the store at .*: roll is '"
    with pytest.raises(CommunicationError, match=told):
        call.receive("roll")

"""tools/doctor.py on real ranks: its report on two healthy nodes, and on each kind of fault.

A rank's node has the name that SLURM gives, so that four processes of one machine can be two nodes.
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from tests.end_to_end.runs import COURSE, MOCK, PRETRAIN, ROOT, SIZES, saved_tensors
from tests.harness.fork_server import wait_for_exit
from tests.harness.job import Job
from tests.harness.token_files import add_document

PREAMBLE = f"""
import os, runpy, signal, sys, threading, time
rank, program = int(os.environ["RANK"]), {str(ROOT / "tools" / "doctor.py")!r}
os.environ["SLURMD_NODENAME"] = "n%d" % (rank // 2)
own_folder = os.path.join(os.path.dirname(sys.argv[0]), os.environ["SLURMD_NODENAME"])
"""
RUN = "\nrunpy.run_path(program, run_name='__main__')\n"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
QUICK = ("--max-bytes", 4096, "--seconds", 100)
FLAGS = (*SIZES, *COURSE, "--global-batch-size", 8, "--train-iters", 1)
IMPATIENT = ("--patience", 6, "--max-bytes", 0)


@dataclass(frozen=True)
class Examined:
    """Result of an examination."""

    codes: list[int]
    stdout: str
    stderr: str
    found: dict[str, Any]
    """Contents of the file of --json."""

    def of(self, severity: str) -> list[tuple[str | None, str]]:
        """Return the node and the text of each finding of a severity."""
        return [(each["node"], each["text"]) for each in self.found["findings"] if each["severity"] == severity]

    def only(self, severity: str, node: str | None, *texts: str) -> None:
        """Assert that, besides warnings, there is one finding, with these texts in it."""
        told = [*self.of("sick"), *self.of("wrong")]
        assert [each[0] for each in told] == [node], self.found["findings"]
        assert self.of(severity) == told
        assert all(text in told[0][1] for text in texts), told
        assert self.found["drop"] == ([node] if severity == "sick" and node else [])
        assert f"{severity}: " in self.stdout


Doctor = Callable[..., Examined]


@pytest.fixture
def doctor(spawn: Callable[..., Job], tmp_path: Path) -> Doctor:
    """`doctor("--flag", value, ranks=4, before="what each rank runs first")`.

    `stopped`: a rank that is suspended for ever. `launcher`: end the other ranks when one has died.
    """

    def examine(
        *flags: Any,
        ranks: int = 4,
        before: str = "",
        stopped: int | None = None,
        launcher: bool = False,
        **environment: str,
    ) -> Examined:
        (tmp_path / "program.py").write_text(PREAMBLE + before + RUN)
        argv = [tmp_path / "program.py", *flags, "--json", tmp_path / "found.json"]
        job = spawn(argv, ranks, LOCAL_WORLD_SIZE="2", **environment)
        if stopped is not None:
            job.wait_for_output(0, "verdict", 120)
            job.kill(stopped)
        if launcher:
            job.wait_as_launcher(120)
        codes = job.wait(120)
        stderr = "".join(job.stderr(rank) for rank in range(ranks))
        assert (tmp_path / "found.json").exists(), f"{codes}\n{job.stdout(0)}\n{stderr}"
        assert all(job.stdout(rank) == "" for rank in range(1, ranks))
        return Examined(codes, job.stdout(0), stderr, json.loads((tmp_path / "found.json").read_text()))

    return examine


def test_two_nodes_that_are_well(doctor: Doctor, tmp_path: Path) -> None:
    done = doctor(*QUICK, *MOCK, *FLAGS, "--save", tmp_path / "run")
    assert done.codes == [0] * 4, done.stdout
    assert done.stderr == ""
    assert done.stdout.endswith("verdict: well\n")
    assert done.found["nodes"].keys() == {"n0", "n1"}
    timed = {(each["scope"], each["operation"]): each for each in done.found["timings"]}
    assert len(timed) == 10
    assert all(list(each["seconds"]) == ["1024", "4096"] for each in timed.values())
    assert abs(done.found["clock_ahead_seconds"]["n1"]) < 1.0
    assert "bus bandwidth" in done.stdout
    assert not (tmp_path / "run").exists()  # it was made for the probe alone


def test_one_node_needs_no_run(doctor: Doctor) -> None:
    done = doctor(*QUICK, ranks=2)
    assert done.codes == [0, 0]
    assert {each["scope"] for each in done.found["timings"]} == {"within a node"}
    assert "there is one node: nothing goes across nodes" in done.stdout


def test_who_breaks_it_off_is_told_no_more_than_was_found(spawn: Callable[..., Job], tmp_path: Path) -> None:
    slow = """
from megalite.extras.doctor.bandwidth import Measurement
Measurement.run = lambda *_: (print("now"), time.sleep(1000))
"""
    (tmp_path / "program.py").write_text(PREAMBLE + slow + RUN)
    job = spawn([tmp_path / "program.py"], 2)
    job.wait_for_output(0, "now")
    job.wait_for_output(1, "now")
    job.kill_all(signal.SIGTERM)
    assert job.wait(120) == [93, 93]
    assert "sick: this was stopped before all checks were done" in job.stdout(0)


# ---------------------------------------------------------------------------------------------------- what ranks have


def test_a_rank_with_another_flag_is_told(doctor: Doctor) -> None:
    other = "if rank == 1: sys.argv[sys.argv.index('1e-2')] = '2e-2'"
    done = doctor("--max-bytes", 0, *MOCK, *FLAGS, before=other)
    assert done.codes == [64] * 4
    done.only("wrong", "n0", "--lr is '0.02' on rank 1, '0.01' on rank 0")


def test_where_rank_0_is_the_odd_one_it_is_told_of(doctor: Doctor) -> None:
    other = "if rank == 0: sys.argv[sys.argv.index('1e-2')] = '2e-2'"
    doctor("--max-bytes", 0, *MOCK, *FLAGS, before=other).only(
        "wrong", "n0", "--lr is '0.02' on rank 0, '0.01' on most"
    )


def test_a_rank_whose_flags_are_wrong_does_not_keep_the_others_from_a_verdict(doctor: Doctor) -> None:
    done = doctor("--max-bytes", 0, *MOCK, *FLAGS, before="if rank == 3: sys.argv += ['--hiden-size', '3']")
    assert done.codes == [64] * 4
    done.only("wrong", None, "on rank 3: unknown flag --hiden-size, did you mean --hidden-size?")


def test_other_software_on_a_node_drops_it_and_another_environment_does_not(doctor: Doctor) -> None:
    before = """
from megalite.extras.doctor import consistency
if rank == 2:
    os.environ["NCCL_DEBUG"] = "INFO"
if rank > 1:
    consistency._version = lambda package: "0.0.1"
"""
    done = doctor("--max-bytes", 0, before=before)
    assert done.codes == [93] * 4
    assert done.found["drop"] == ["n1"]
    assert ("n1", "NCCL_DEBUG is 'INFO' on rank 2, 'nothing' on rank 0") in done.of("warning")


def write_tokens(prefix: Path, tokens: int) -> None:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        add_document(writer, np.arange(tokens) % 50)
        writer.finish()


def test_data_that_a_node_lacks_or_has_otherwise(doctor: Doctor, tmp_path: Path) -> None:
    for node in ("n0", "n1", "n2"):
        write_tokens(tmp_path / node / "a", 100)
        write_tokens(tmp_path / node / "b", 100)
    write_tokens(tmp_path / "n1" / "b", 99)
    (tmp_path / "n2" / "a.bin").unlink()
    data = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 60, "--data-path", "a", "b")
    flags = (*data, *FLAGS, "--global-batch-size", 12)
    done = doctor("--max-bytes", 0, *flags, ranks=6, before="os.chdir(own_folder)")
    assert done.codes == [93] * 6
    assert sorted(done.found["drop"]) == ["n1", "n2"]
    (missing,) = (text for node, text in done.of("sick") if node == "n2")
    assert missing.startswith("a.bin is missing, but on other nodes of 200 bytes")
    assert {text.split()[0] for node, text in done.of("sick") if node == "n1"} == {"b.bin", "b.idx"}


# ---------------------------------------------------------------------------------------------------- the run directory


def test_a_run_directory_that_nodes_do_not_share(doctor: Doctor, tmp_path: Path) -> None:
    for node in ("n0", "n1"):
        (tmp_path / node).mkdir()
    before = """
from megalite.extras.doctor import run_directory
run_directory.SEEN_WITHIN = 0.5
os.chdir(own_folder)
"""
    done = doctor("--max-bytes", 0, *MOCK, *FLAGS, "--save", "run", before=before)
    assert done.codes == [93] * 4
    done.only("sick", "n1", "--save run is another directory here")


def test_a_checkpoint_takes_what_the_doctor_says_and_there_must_be_room(
    doctor: Doctor, spawn: Callable[..., Job], tmp_path: Path
) -> None:
    flags = (*MOCK, *FLAGS, "--bf16", "--save", tmp_path / "run", "--tp", 2, "--eval-iters", 0)
    assert spawn([PRETRAIN, *flags], 2, directory=tmp_path / "training").wait() == [0, 0]
    saved = saved_tensors(tmp_path / "run" / "iter_0000001").values()
    done = doctor("--max-bytes", 0, "--checkpoints", 10**12, *flags, ranks=2)
    assert done.codes == [64] * 2
    assert done.found["checkpoint_bytes"] == sum(tensor.nbytes for tensor in saved)
    done.only("wrong", None, "1000000000000 checkpoints take")


# ---------------------------------------------------------------------------------------------------- who is silent


def test_ranks_that_never_come_are_named_with_their_node(doctor: Doctor) -> None:
    done = doctor(*IMPATIENT, before="if rank == 3: os._exit(0)")
    assert done.codes == [93] * 3 + [0]
    done.only("sick", "n1", "rank 3 of 4 never connected within 6 seconds")


def test_a_rank_that_stands_still_and_a_file_system_that_hangs_are_told_apart(doctor: Doctor, tmp_path: Path) -> None:
    before = f"""
from megalite.extras.doctor import examination, reports, run_directory
if rank == 0:
    run_directory.Probe._remove = lambda probe: time.sleep(1000)
    run_directory._REMOVING_SECONDS = 0.1
if rank == 1:
    examination.traits = lambda *_: {STOP}
if rank == 2:
    reports.fingerprints = lambda data: time.sleep(1000)
"""
    done = doctor(*IMPATIENT, *MOCK, *FLAGS, "--save", tmp_path / "run", before=before, stopped=1)
    assert done.codes == [93, -9, 93, 93]
    assert done.of("sick") == [
        ("n0", "rank 1 connected, but then did not answer: ended, or suspended"),
        ("n1", "reading the data does not end: does a file system hang?"),
    ]


@pytest.mark.wide
def test_a_rank_that_dies_while_messages_are_timed_is_named_though_its_launcher_ends_all(doctor: Doctor) -> None:
    before = """
from megalite.extras.doctor.bandwidth import Measurement
if rank == 2:
    Measurement.run = lambda *_: os._exit(3)
"""
    done = doctor("--patience", 60, *QUICK[:2], before=before, launcher=True)
    assert done.codes[0] == 93
    done.only("sick", "n1", "rank 2 did not return from timing messages")


def test_where_rank_0_has_the_store_and_stands_still_the_others_end(spawn: Callable[..., Job], tmp_path: Path) -> None:
    """Check the doctor's own time limit: none of torch's applies in this case."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = f"""
from megalite.extras.doctor import roll_call
from megalite.lifecycle import failure, rendezvous
failure._LAUNCHER_SECONDS = 1.0
rendezvous.STORE_HANGS = 0.5
gather = roll_call.RollCall.gather

def disturbed(*arguments):
    open(own_folder + str(rank), "w").close()
    while not os.path.exists(own_folder + "1"):
        time.sleep(0.05)
    if rank == 0:
        open(own_folder + "_stopped", "w").close()
        {STOP}
    while not os.path.exists(own_folder + "_stopped"):
        time.sleep(0.05)
    time.sleep(0.5)
    return gather(*arguments)

roll_call.RollCall.gather = disturbed
"""
    (tmp_path / "program.py").write_text(PREAMBLE + before + RUN)
    store = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    job = spawn([tmp_path / "program.py", "--patience", 2], 2, **store)
    assert wait_for_exit([job.ranks[1]], 60) == []
    assert job.ranks[1].exit_code == 85
    assert "error on rank 1: the store at 127.0.0.1" in job.stderr(1)
    assert "does not answer: " in job.stderr(1)


def test_ports_that_cannot_be_reached_are_told_before_anything_waits_for_them(doctor: Doctor) -> None:
    before = """
from megalite.extras.doctor import reports
from megalite.extras.doctor.network import Listener
class Closed(Listener):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.__exit__()
if rank == 2:
    reports.Listener = Closed
"""
    done = doctor(*QUICK, before=before)
    assert done.codes == [93] * 4
    done.only("sick", None, "n0 does not reach n1 at 127.0.0.1 (Connection refused)")
    assert done.found["timings"] == []

"""Ranks that fail are started again within the job: the run is, to the bit, the one that was not disturbed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.campaign import RANKS, STEPS, Campaign
from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, Start, iterations
from tests.extras.recovery import processes
from tests.extras.recovery.processes import agents, agents_at, kill, no_orphans, until
from tests.harness.fault import Fault
from tests.harness.job import Job, free_port

WARM = ("--warm-restart",)


def everything(job: Job, ranks: int = RANKS) -> str:
    return "\n".join([job.stdout(0), *map(job.stderr, range(ranks))])


def restarts(job: Job) -> list[str]:
    """Return what rank 0 says of the generations after the first."""
    return re.findall(r"^generation \d+: .*", job.stdout(0), re.M)


def disturb(
    campaign: Campaign,
    *faults: Fault,
    code: int = 85,
    hangs: bool = False,
    save_interval: int = 1,
    more: tuple[str, ...] = (),
) -> list[str]:
    """Start the run with faults; return what is said of restarts. `more`: flags beside --warm-restart."""
    with campaign.start(
        ";".join(map(str, faults)),
        steps=6,
        least_seconds=2.0 if hangs else 60.0,
        longest_seconds=8.0 if hangs else 120.0,
        save_interval=save_interval,
        more=(*WARM, *more),
    ) as job:
        until(lambda: agents(job), "no agent")
        tree = agents(job)
        codes = job.wait(120.0)
        said = everything(job)
        assert codes == [code] * RANKS, f"{codes}\n{said}"
        assert all(fault.record(campaign.folder).exists() for fault in faults), said
        no_orphans(tree)
        return restarts(job)


@pytest.mark.wide_except("backward/3/2/kill")
@pytest.mark.parametrize(
    "fault",
    [
        Fault("index build", 0, 0, "kill"),
        pytest.param(Fault("connected", 1, 0, "kill"), marks=pytest.mark.wide),
        pytest.param(Fault("meeting", 0, 0, "exit"), marks=pytest.mark.wide),
        pytest.param(Fault("building", 2, 0, "kill"), marks=pytest.mark.wide),
        Fault("backward", 3, 2, "kill"),
        pytest.param(Fault("reduce", 0, 2, "crash"), marks=pytest.mark.wide),
        pytest.param(Fault("writing", 1, 2, "kill"), marks=pytest.mark.wide),
        Fault("commit", 0, 2, "kill"),
        pytest.param(Fault("saved", 0, 2, "exit"), marks=pytest.mark.wide),
        pytest.param(Fault("forward", 2, 2, "defect"), marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_a_run_goes_on_after_the_death_of_a_rank(fault: Fault, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "tp")
    (said,) = disturb(campaign, fault)
    how = {"kill": "was killed by SIGKILL", "crash": "was killed by SIGSEGV", "exit": "ended with exit code 1"}
    expected = f"generation 2: rank {fault.rank} on {os.uname().nodename} {how.get(fault.kind, '')}"
    assert said.startswith(expected) or fault.kind == "defect", said
    campaign.assert_unbroken()


@pytest.mark.wide
def test_a_run_goes_on_from_copies_in_memory(tmp_path: Path) -> None:
    """Nothing is on disk when the rank dies."""
    campaign = Campaign(tmp_path / "campaign", "tp")
    every = ("--memory-checkpoint-interval", "1")
    (said,) = disturb(campaign, Fault("backward", 2, 4, "kill"), save_interval=STEPS, more=every)
    assert re.search(r"; went on after step [123], ", said), said
    campaign.assert_unbroken()


@pytest.mark.wide
def test_a_run_goes_on_after_a_hang(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "pp")
    (said,) = disturb(campaign, Fault("backward", 1, 2, "stop"), hangs=True)
    assert said.startswith("generation 2: rank "), said
    campaign.assert_unbroken()


@pytest.mark.wide
def test_a_run_goes_on_after_a_second_death_during_recovery(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "tp")
    said = disturb(campaign, Fault("forward", 2, 2, "kill"), Fault("loading", 1, 0, "kill"))
    assert [line.split(":")[0] for line in said] == ["generation 3"]
    campaign.assert_unbroken()


@pytest.mark.wide
def test_bad_data_ends_the_run(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "tp")
    assert disturb(campaign, Fault("forward", 1, 2, "data"), code=64) == []


@pytest.mark.wide
def test_three_generations_without_progress_end_the_run(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "tp")
    faults = [Fault(phase, 1, 1, "kill") for phase in ("forward", "backward", "reduce")]  # one a generation
    with campaign.start(";".join(map(str, faults)), steps=6, more=WARM) as job:
        assert job.wait(120.0) == [93] * RANKS, everything(job)
        told = job.stderr(0)
    assert told.count("error: ") == 1
    assert "3 generations began after step 0 and failed: generation 1: rank 1 on " in told, told
    assert told.count("was killed by SIGKILL") == 3, told


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.wide)])
def test_a_stop_signal_ends_the_run_for_good(number: int, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "tp")
    with campaign.start(steps=20, step_seconds=0.1, more=WARM) as job:
        job.wait_for_output(0, "step ")
        tree = agents(job)
        job.kill(2, number)
        assert job.wait(60.0) == [85] * RANKS, everything(job)
        assert "stopped after step" in job.stdout(0)
        assert everything(job).count("error") == 0
        no_orphans(tree)
    campaign.assert_unbroken()


@pytest.mark.wide
def test_a_stop_file_during_recovery_ends_the_run(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "tp")
    campaign.directory.mkdir()
    (campaign.directory / "STOP").touch()  # of an earlier run
    fault = Fault("forward", 2, 2, "kill")
    with campaign.start(str(fault), steps=20, step_seconds=0.1, more=WARM) as job:
        until(fault.record(campaign.folder).exists, "no fault")
        (campaign.directory / "STOP").touch()
        assert job.wait(60.0) == [85] * RANKS, everything(job)
        assert "stopped " in job.stdout(0), everything(job)
    assert campaign.latest < 10
    (campaign.directory / "STOP").unlink()
    campaign.assert_unbroken()


@pytest.mark.wide
def test_ranks_end_with_their_agent(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "tp")
    with campaign.start(steps=50, step_seconds=0.1, more=WARM) as job:
        job.wait_for_output(0, "step ")
        tree = agents(job)
        (agent,) = tree
        kill(agent)
        assert job.wait(30.0) == [85] * RANKS, everything(job)
        assert "error: the agent of this node's ranks has ended without a message" in job.stderr(0)
        no_orphans(tree)
    campaign.assert_unbroken()


@pytest.mark.wide
def test_ranks_end_with_a_process_of_the_launcher(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "tp")
    with campaign.start(steps=50, step_seconds=0.1, more=WARM) as job:
        job.wait_for_output(0, "step ")
        tree = agents(job)
        job.kill(2)
        assert job.wait(30.0) == [85, 85, -signal.SIGKILL, 85], everything(job)
        assert "rank 2's process of the launcher on" in job.stderr(0)
        no_orphans(tree)
    campaign.assert_unbroken()


@pytest.mark.wide
def test_ranks_end_with_the_process_that_calls_the_store(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "tp")
    with campaign.start(steps=50, step_seconds=0.1, more=WARM) as job:
        job.wait_for_output(0, "step ")
        tree = agents(job)
        ((agent, children),) = tree.items()
        assert len(os.listdir(f"/proc/{agent}/task")) == 1  # it forks
        kill(children[0])
        assert job.wait(30.0) == [85] * RANKS, everything(job)
        no_orphans(tree)
    campaign.assert_unbroken()


@pytest.mark.wide
def test_every_rank_may_be_killed_from_outside(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", "tp")
    with campaign.start(steps=30, step_seconds=0.1, store_of_rank_0=True, more=WARM) as job:
        for number in range(RANKS):
            before = campaign.latest
            until(lambda least=before: campaign.latest > least, "no step")  # type: ignore[misc]
            kill(processes.ranks(job)[number])
            job.wait_for_output(0, f"generation {number + 2}: rank {number} on {os.uname().nodename} was killed")
        assert job.wait(60.0) == [85] * RANKS, everything(job)
    campaign.assert_unbroken()


@pytest.mark.wide
def test_a_stop_file_ends_a_run_whose_ranks_are_not_all_there(start: Start, tmp_path: Path) -> None:
    """The other node is late."""
    flags = [*GPT2, "--micro-batch-size", 1, "--train-iters", 4, "--save", tmp_path / "run", "--resume", "auto"]
    job = start(*flags, "--warm-restart", world_size=2, LOCAL_WORLD_SIZE="2", WORLD_SIZE="4")
    until(lambda: [len(children) for children in agents(job).values()] == [1], "no agent meets")
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "STOP").touch()
    assert job.wait(30.0) == [85, 85], job.stderr(0)


_SUSPENDED_IN_THE_MEETING = """
import os, pathlib, signal
from megalite.commands.pretrain import main
from megalite.lifecycle import rendezvous
from megalite.lifecycle.failure import run_main

wait_for_all_ranks, once = rendezvous.wait_for_all_ranks, pathlib.Path(__file__).with_name("once")

def come(mailbox, place, seconds, watch):
    if place.rank == 1 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for_all_ranks(mailbox, place, 4.0 if os.environ["MEGALITE_GENERATION"] == "1" else 30.0, watch)

if __name__ == "__main__":
    rendezvous.wait_for_all_ranks = come
    run_main(main)
"""


@pytest.mark.wide
def test_a_rank_that_is_suspended_before_it_meets_the_others_is_replaced(tmp_path: Path) -> None:
    """Rank 2 has met rank 0, and ends because of it, but not on purpose."""
    entry = tmp_path / "entry.py"
    entry.write_text(_SUSPENDED_IN_THE_MEETING)
    flags = [*MOCK, *GPT2, "--micro-batch-size", 1, "--global-batch-size", 3, "--train-iters", 3, "--warm-restart"]
    with Job([entry, *flags, "--save", tmp_path / "run", "--resume", "auto"], 3, tmp_path / "job") as job:
        assert job.wait(90.0) == [0] * 3, everything(job, 3)
        (said,) = restarts(job)
    assert re.match(r"generation 2: rank [02] on \S+ ended with exit code 85; went on after step 0, ", said), said


@pytest.mark.wide
def test_a_process_alone_outlives_its_shell_and_needs_no_streams(tmp_path: Path) -> None:
    """The shell ends in the middle of the run, so that it is the process's parent when the run begins."""
    flags = [*MOCK, *GPT2, "--train-iters", "60", "--save", str(tmp_path / "run"), "--resume", "auto"]
    command = shlex.join([sys.executable, str(PRETRAIN), *flags, "--warm-restart"])
    begun = shlex.quote(str(tmp_path / "run" / "metrics.jsonl"))
    shell = f"nohup {command} <&- >&- 2>&- & while [ ! -s {begun} ]; do sleep 0.05; done"
    subprocess.run(["sh", "-c", shell], check=True, timeout=60)
    assert not (tmp_path / "run" / "DONE").exists()
    until((tmp_path / "run" / "DONE").exists, "the run has not finished", 120.0)
    assert iterations(tmp_path / "run") == list(range(1, 61))


@pytest.mark.wide
def test_one_process_alone_goes_on(start: Start, tmp_path: Path) -> None:
    flags = [*GPT2, "--train-iters", 1000, "--save", tmp_path / "run", "--save-interval", 1, "--resume", "auto"]
    job = start(*flags, "--warm-restart")
    job.wait_for_output(0, "step ")
    kill(processes.ranks(job)[0])
    job.wait_for_output(0, "\ngeneration 2: rank 0 on ")
    job.kill(0, signal.SIGTERM)
    assert job.wait(60.0) == [85], job.stderr(0)


_LAUNCHER = """
import os, subprocess, sys
told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
ranks = [
    subprocess.Popen([sys.executable, *sys.argv[2:]], env=os.environ | told | {"RANK": str(r), "LOCAL_RANK": str(r)})
    for r in range(2)
]
for rank in ranks:
    rank.wait()
"""


def test_nothing_outlives_the_launcher(tmp_path: Path) -> None:
    """A launcher that is killed ends no rank itself."""
    port = free_port()
    flags = [*MOCK, *GPT2, "--train-iters", "100000", "--save", str(tmp_path / "run"), "--resume", "auto"]
    command = [sys.executable, "-c", _LAUNCHER, str(port), str(PRETRAIN), *flags, "--warm-restart"]
    with (tmp_path / "output").open("wb") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=output)
    until(lambda: b"step " in (tmp_path / "output").read_bytes(), (tmp_path / "output").read_text())
    tree = agents_at(port)
    assert [len(children) for children in tree.values()] == [3]
    launcher.kill()
    launcher.wait()
    no_orphans(tree)

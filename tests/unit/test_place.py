"""A process knows its place among others from its launcher, or is refused: none takes itself for the only one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.errors import ConfigurationError
from megalite.process.place import Place, place_from_environment
from tests.harness.tool import run_tool

ROOT = Path(__file__).parents[2]
TORCHRUN = "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 MASTER_ADDR=node1 MASTER_PORT=29500"
STEP = "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=3 SLURM_LOCALID=3"
LAUNCHERS = {
    STEP: "srun started 8 processes .*RANK=.SLURM_PROCID WORLD_SIZE=.SLURM_STEP_NUM_TASKS",
    STEP.replace("SLURM_PROCID=3", "SLURM_PROCID=0"): "srun started 8",
    "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1": "mpirun started 2 .*RANK=.OMPI_COMM_WORLD_RANK",
    "PMI_SIZE=4 PMI_RANK=0": "mpiexec started 4",
    "PMI_SIZE=4 PMI_RANK=0 PALS_RANKID=0": "mpiexec started 4",
    "PALS_RANKID=0": r"mpiexec started this as process 0 of several \(PALS_RANKID\)",
    "PMIX_RANK=1": "an MPI launcher started this as process 1",
    "MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_RANK=0": "mpirun_rsh started 2",
    "MVP_COMM_WORLD_SIZE=2 MVP_COMM_WORLD_RANK=0": "mpirun_rsh started 2",
    "JSM_NAMESPACE_SIZE=6 JSM_NAMESPACE_RANK=0": "jsrun started 6",
    "FLUX_JOB_SIZE=2 FLUX_TASK_RANK=0": "flux started 2",
    "LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=0": "a LeaderWorkerSet started 2",
    "PET_NNODES=1:2 PET_NODE_RANK=0": "a training operator started 2",
    "JOB_COMPLETION_INDEX=0": "an indexed Job of Kubernetes started this as process 0 of several",
    "JOB_COMPLETION_INDEX=1 OMPI_COMM_WORLD_SIZE=1": "an indexed Job",
    "WORLD_SIZE=1 PMI_SIZE=2": "mpiexec started 2",
    "LOCAL_RANK=1 PMI_SIZE=2": "mpiexec started 2",
}
WRONG = {
    "RANK=a WORLD_SIZE=2": "RANK='a': the launcher must give a whole number",
    "RANK=0 WORLD_SIZE=-1": "WORLD_SIZE='-1': the launcher must give a whole number of at least 0",
    "RANK=0 WORLD_SIZE=": r"WORLD_SIZE='' \(is a shell variable not set\?\)",
    TORCHRUN.replace("LOCAL_RANK=1", "LOCAL_RANK=1.5"): "LOCAL_RANK='1.5'",
    "RANK=0 WORLD_SIZE=0": "WORLD_SIZE=0: must be at least 1",
    TORCHRUN.replace("RANK=5", "RANK=8", 1): "RANK=8: WORLD_SIZE=8 ranks are numbered 0 to 7",
    "RANK=1 WORLD_SIZE=1": "RANK=1: WORLD_SIZE=1",
    "RANK=1": "RANK=1 without WORLD_SIZE.*unset RANK",
    "LOCAL_RANK=0": "LOCAL_RANK=0 without WORLD_SIZE",
    "WORLD_SIZE=8": "WORLD_SIZE=8 without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: torchrun sets them all",
    TORCHRUN.replace("LOCAL_RANK=1 ", ""): "WORLD_SIZE=8 without LOCAL_RANK:",
    TORCHRUN.replace("node1", ""): "WORLD_SIZE=8 without MASTER_ADDR:",
    TORCHRUN.replace("29500", "auto"): "MASTER_PORT='auto' is not a port",
    TORCHRUN.replace("29500", "65536"): "MASTER_PORT='65536' is not a port",
}
PLACES = {
    "": Place(0, 0, 1),
    TORCHRUN: Place(5, 1, 8),
    f"{TORCHRUN} {STEP}": Place(5, 1, 8),  # torchrun on each node of a step, or slurm/ with LAUNCHER=srun
    f"RANK=0 WORLD_SIZE=1 LOCAL_RANK=3 {STEP}": Place(0, 3, 1),  # one of a sweep, which is to be alone
    "WORLD_SIZE=1": Place(0, 0, 1),
    # A batch script: SLURM tells it the job's tasks, and that it is the first one.
    "SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_NPROCS=8 SLURM_PROCID=0 SLURM_LOCALID=0": Place(0, 0, 1),
    # The shell that salloc opens on the first node, by a step of its own.
    STEP.replace("STEP_ID=0", "STEP_ID=4294967290") + " PMIX_RANK=0": Place(0, 0, 1),
    "SLURM_JOB_ID=7 SLURM_STEP_ID=1 SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 PMIX_RANK=0": Place(0, 0, 1),
    "OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0 PMIX_RANK=0": Place(0, 0, 1),
    "PET_NNODES=1 PET_NPROC_PER_NODE=auto": Place(0, 0, 1),
}


def variables(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split())


def set_environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Set the variables of launchers in `text`, and delete those with which the tests themselves were started."""
    for cases in (LAUNCHERS, WRONG, PLACES):
        for name in {name for case in cases for name in variables(case)}:
            monkeypatch.delenv(name, raising=False)
    for name, value in variables(text).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("environment", PLACES)
def test_a_place_is_what_the_launcher_says(environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, environment)
    assert place_from_environment() == PLACES[environment]


@pytest.mark.parametrize("environment", [*LAUNCHERS, *WRONG])
def test_a_place_that_is_not_told_is_refused(environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, environment)
    with pytest.raises(ConfigurationError, match=(LAUNCHERS | WRONG)[environment]):
        place_from_environment()


@pytest.mark.parametrize(
    ("tool", "flags"),
    [("generate", "--load x"), ("evaluate", "--load x --text y"), ("doctor", "")],
)
def test_tools_that_use_ranks_refuse_to_be_alone_by_mistake(
    tool: str, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, STEP)
    ended = run_tool(tool, *flags.split())
    assert ended.code == 64
    assert "srun started 8 processes" in ended.stderr


@pytest.mark.parametrize("environment", [STEP, "RANK=a WORLD_SIZE=2"])
def test_training_refuses_it_at_once_with_exit_code_64(environment: str) -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "pretrain_gpt.py"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"} | variables(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (64, "")
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1

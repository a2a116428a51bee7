"""Ranks train alike under every launcher: simulated by its variables, and under a real mpirun and mpiexec."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, ROOT, ended, metrics, words
from tests.harness.job import Job, free_port

RANKS = 2
FLAGS = (*MOCK, *GPT2, *words("--train-iters 2 --tp 2 --distributed-timeout-minutes 1"))
LAUNCHERS = {
    "torchrun, after a node has joined": (
        "TORCHELASTIC_RUN_ID=run TORCHELASTIC_RESTART_COUNT={rank} TORCHELASTIC_USE_AGENT_STORE=False RANK={rank} "
        "LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    ),
    "srun, two tasks of a node": (
        "SLURM_JOB_ID={job} SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID={rank} SLURM_LOCALID={rank} "
        "SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=no-such-name"
    ),
    "srun, a task of each node": (
        "SLURM_JOB_ID={job} SLURM_STEP_ID=1 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID={rank} SLURM_LOCALID=0 "
        "SLURM_NODEID={rank} SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_STEP_NODELIST=127.0.0.[1-2]"
    ),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK={rank} "
        "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK={rank} PMIX_NAMESPACE={job}"
    ),
    "Hydra": "PMI_RANK={rank} PMI_SIZE=2 MPI_LOCALRANKID={rank} MPI_LOCALNRANKS=2",
    "PALS": (
        "PALS_RANKID={rank} PALS_LOCAL_RANKID=0 PALS_LOCAL_SIZE=1 PALS_APID={job} PMI_RANK={rank} PMI_SIZE=2 "
        "MASTER_ADDR=127.0.0.1"
    ),
    "an indexed Job": "JOB_COMPLETION_INDEX={rank} WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT={port}",
    "a TrainJob": (
        "PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_NODE_RANK={rank} PET_MASTER_ADDR=localhost PET_MASTER_PORT={port} "
        "JOB_COMPLETION_INDEX={rank}"
    ),
    "TensorFlow": (
        'TF_CONFIG={{"cluster":{{"worker":["localhost:{port}","127.0.0.1:1"]}},'
        '"task":{{"type":"worker","index":{rank}}}}}'
    ),
}
COMMANDS = {
    "mpirun.openmpi": "--allow-run-as-root --oversubscribe --bind-to none -n 2",
    "mpiexec.hydra": "-n 2",
}


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of the same training under torchrun's variables."""
    folder = tmp_path_factory.mktemp("torchrun")
    with Job([PRETRAIN, *FLAGS, "--save", folder / "run"], RANKS, folder / "job") as job:
        ended(job)
    return folder / "run"


@pytest.mark.wide_except("torchrun, after a node has joined", "srun, a task of each node", "Open MPI")
@pytest.mark.parametrize(
    "launcher",
    [
        # Pods of the manifests run with the variables of a Job and a TrainJob (tests/kubernetes/test_manifests.py).
        pytest.param(name, marks=pytest.mark.wide if name in ("an indexed Job", "a TrainJob", "TensorFlow") else ())
        for name in LAUNCHERS
    ],
)
def test_ranks_under_a_launchers_variables_give_torchruns_losses(launcher: str, torchrun: Path, tmp_path: Path) -> None:
    job, port = secrets.randbits(30), free_port()
    texts = [LAUNCHERS[launcher].format(rank=rank, job=job, port=port) for rank in range(RANKS)]
    told = [dict(pair.split("=", 1) for pair in text.split()) for text in texts]
    with Job([PRETRAIN, *FLAGS, "--save", tmp_path / "run"], RANKS, tmp_path / "job", told=told) as run:
        ended(run)
    assert metrics(tmp_path / "run") == metrics(torchrun)


@pytest.mark.wide  # fresh interpreters
@pytest.mark.parametrize("command", COMMANDS)
def test_ranks_of_a_real_launcher_of_mpi_give_torchruns_losses(
    command: str, torchrun: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(command) is None:
        pytest.skip(f"NOT RUN: {command} is not installed (.ci/run installs it)")
    arguments = [command, *COMMANDS[command].split(), sys.executable, PRETRAIN, *FLAGS, "--save", tmp_path / "run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run([str(each) for each in arguments], env=environment, timeout=120, check=False)
    assert done.returncode == 0, capfd.readouterr().err
    assert metrics(tmp_path / "run") == metrics(torchrun)

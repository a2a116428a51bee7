"""srun alone starts the ranks of a training: they find their places and rank 0 from its variables."""

from __future__ import annotations

import shlex
import shutil

import pytest

from tests.end_to_end.runs import PRETRAIN
from tests.slurm.conftest import FLAGS, STEPS, Training
from tests.slurm.jobs import submit

pytestmark = pytest.mark.slurm


def test_ranks_that_srun_starts_without_torchrun_train_to_the_end(training: Training) -> None:
    if not training.cluster.namespaces:
        pytest.skip("nodes that share one address have no names that lead to it")
    program = shlex.join(["python", *map(str, (PRETRAIN, *FLAGS, "--save", training.run))])
    options = ("--nodes=2", "--ntasks-per-node=2", f"--wrap=srun --cpu-bind=none --label {program}")
    job = submit(training.cluster, *options, directory=training.directory)
    job.wait()
    training.assert_whole(ranks=4)
    assert job.log.count(f"step {STEPS}/{STEPS}") == 1


def test_ranks_of_mpirun_train_on_the_nodes_of_a_job(training: Training) -> None:
    """Open MPI starts an agent on the other node by srun, whose variables its ranks inherit."""
    if shutil.which("mpirun.openmpi") is None or not training.cluster.namespaces:
        pytest.skip("NOT RUN: Open MPI is not installed (.ci/run installs it), or nodes share one address")
    program = shlex.join(["python", *map(str, (PRETRAIN, *FLAGS, "--save", training.run))])
    mpirun = "mpirun.openmpi --allow-run-as-root --bind-to none -n 4 -x MASTER_ADDR -x PATH -x PYTHONPATH"
    options = ("--nodes=2", "--ntasks-per-node=2", f"--wrap=MASTER_ADDR=$SLURMD_NODENAME {mpirun} {program}")
    job = submit(training.cluster, *options, directory=training.directory)
    job.wait()
    training.assert_whole(ranks=4)

"""A process knows its place among others from its launcher, or is refused: none takes itself for the only one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.errors import ConfigurationError
from megalite.process import launchers, place
from megalite.process.launchers import HOROVOD_SETTINGS, POD_PORT, RANK_VARIABLES, derived_port, first_host
from megalite.process.place import Place, place_from_environment, place_or_alone
from tests.harness.job import Job
from tests.harness.tool import run_tool

ROOT = Path(__file__).parents[2]
AGENT = "TORCHELASTIC_RUN_ID=1"
GIVEN = "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29500"
ADDRESS = "MASTER_ADDR=node1 MASTER_PORT=29500"
STEP = (
    "SLURM_JOB_ID=7 SLURM_STEP_ID=2 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=5 SLURM_LOCALID=1 "
    "SLURM_NODEID=2 SLURM_STEP_TASKS_PER_NODE=2(x4) SLURM_STEP_NODELIST=n[08-10,12]"
)
AGENTS = (
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=1 SLURM_LOCALID=0 "
    "SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=1(x4) SLURM_STEP_NODELIST=n[08-11]"
)
OPEN_MPI = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
HYDRA = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2"
HOROVOD = "HOROVOD_RANK=1 HOROVOD_SIZE=2 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2"
ELASTIC = f"{HOROVOD} HOROVOD_ELASTIC=1"
PALS = "PALS_RANKID=3 PALS_LOCAL_RANKID=1 PALS_APID=ab PMI_RANK=3 PMI_SIZE=4 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2"
TRAIN_JOB = "PET_NNODES=4 PET_NPROC_PER_NODE=1 PET_NODE_RANK=3 PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29400"
JOB = "JOB_COMPLETION_INDEX=3 WORLD_SIZE=4 MASTER_ADDR=job-0.job"
WORKERS = 'TF_CONFIG={"cluster":{"worker":["b:2222","c:2222"],"chief":["a:2222"]},"task":{"type":"worker","index":1}}'
ON_ONE_HOST = (
    'TF_CONFIG={"cluster":{"worker":["localhost:81","localhost:82"]},"task":{"type":"worker","index":1},"trial":""}'
)
WITH_SERVERS = WORKERS.replace('"chief"', '"ps":["d:2222","d:2223"],"evaluator":["e:1"],"chief"')
STEP_PORT, PALS_PORT, HERE = derived_port("7", "2", ""), derived_port("ab"), derived_port("999")

PLACES = {
    "": Place(0, 0, 1),
    GIVEN: Place(5, 1, 8, 2, "node1", 29500),
    "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 MASTER_ADDR=node1 MASTER_PORT=29500": Place(5, 1, 8, None, "node1", 29500),
    "WORLD_SIZE=1": Place(0, 0, 1),
    # srun: tasks are ranks, and what a person has set comes first
    STEP: Place(5, 1, 8, 2, "n08", STEP_PORT),
    f"{STEP} MASTER_ADDR=10.0.0.1": Place(5, 1, 8, 2, "10.0.0.1", STEP_PORT),
    f"{STEP} LOCAL_RANK=0 CUDA_VISIBLE_DEVICES=3": Place(5, 0, 8, 2, "n08", STEP_PORT),  # each task sees only its GPU
    f"{STEP} LOCAL_RANK=0 CUDA_VISIBLE_DEVICES=": Place(5, 0, 8, 2, "n08", STEP_PORT),
    STEP.replace("SLURM_STEP_NUM_TASKS=8", ""): Place(5, 1, 8, 2, "n08", STEP_PORT),
    f"{STEP} {GIVEN}": Place(5, 1, 8, 2, "node1", 29500),  # slurm/ with LAUNCHER=srun
    f"{STEP} PMI_RANK=5 PMI_SIZE=8 PMIX_RANK=5": Place(5, 1, 8, 2, "n08", STEP_PORT),  # srun --mpi=...
    STEP.replace("2(x4)", "8").replace("NODEID=2", "NODEID=0"): Place(5, 1, 8, 8, "127.0.0.1", STEP_PORT),
    # an agent in each task, which starts ranks
    f"{AGENTS} {AGENT} {GIVEN}": Place(5, 1, 8, 2, "node1", 29500),
    f"{STEP} {AGENT} {GIVEN.replace('RANK=5', 'RANK=2', 1)}": Place(2, 1, 8, 2, "node1", 29500),
    f"{AGENTS} {GIVEN}": Place(5, 1, 8, 2, "node1", 29500),
    f"{AGENTS} {OPEN_MPI}": Place(1, 1, 2, 2, "127.0.0.1", HERE),
    # one of a sweep, which is to be alone
    f"RANK=0 WORLD_SIZE=1 LOCAL_RANK=3 {STEP}": Place(0, 3, 1),
    # a batch script: SLURM tells it the job's tasks, and that it is the first one
    "SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_NPROCS=8 SLURM_PROCID=0 SLURM_LOCALID=0": Place(0, 0, 1),
    "SLURM_JOB_ID=7 SLURM_STEP_ID=4294967291 SLURM_NTASKS=8 SLURM_PROCID=0": Place(0, 0, 1),
    # the shell that salloc opens on the first node, by a step of its own
    STEP.replace("STEP_ID=2", "STEP_ID=4294967290") + " PMIX_RANK=0": Place(0, 0, 1),
    STEP.replace("STEP_ID=2", "STEP_ID=4294967290") + f" {OPEN_MPI}": Place(1, 1, 2, 2, "127.0.0.1", HERE),
    "SLURM_JOB_ID=7 SLURM_STEP_ID=1 SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 PMIX_RANK=0": Place(0, 0, 1),
    # launchers of MPI programs
    OPEN_MPI: Place(1, 1, 2, 2, "127.0.0.1", HERE),
    f"{OPEN_MPI} PMIX_RANK=1 PMIX_NAMESPACE=77": Place(1, 1, 2, 2, "127.0.0.1", derived_port("77")),
    f"{OPEN_MPI.replace('SIZE=2', 'SIZE=4', 1)} MASTER_ADDR=node1 PMIX_NAMESPACE=7": Place(
        1, 1, 4, 2, "node1", derived_port("7")
    ),
    f"RANK=1 {HYDRA}": Place(1, 1, 2, 2, "127.0.0.1", HERE),
    "OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0 PMIX_RANK=0": Place(0, 0, 1),
    HYDRA: Place(1, 1, 2, 2, "127.0.0.1", HERE),
    HOROVOD: Place(1, 1, 2, 2, "127.0.0.1", HERE),
    f"{HOROVOD.replace('SIZE=2', 'SIZE=4', 1)} HOROVOD_GLOO_RENDEZVOUS_PORT=77 MASTER_ADDR=node1": Place(
        1, 1, 4, 2, "node1", derived_port("77")
    ),
    f"{PALS} MASTER_ADDR=node1": Place(3, 1, 4, 2, "node1", PALS_PORT),
    f"PMIX_RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 {ADDRESS}": Place(1, 1, 2, None, "node1", 29500),
    OPEN_MPI.replace("OMPI_COMM_WORLD", "MV2_COMM_WORLD"): Place(1, 1, 2, 2, "127.0.0.1", HERE),
    OPEN_MPI.replace("OMPI_COMM_WORLD", "MVP_COMM_WORLD"): Place(1, 1, 2, 2, "127.0.0.1", HERE),
    OPEN_MPI.replace("OMPI_COMM_WORLD", "JSM_NAMESPACE"): Place(1, 1, 2, 2, "127.0.0.1", HERE),
    "FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2 FLUX_TASK_LOCAL_ID=0 FLUX_JOB_ID=f1 MASTER_ADDR=node1": Place(
        1, 0, 2, None, "node1", derived_port("f1")
    ),
    # pods of Kubernetes
    JOB: Place(3, 0, 4, 1, "job-0.job", POD_PORT),
    TRAIN_JOB: Place(3, 0, 4, 1, "job-node-0-0.job", 29400),
    f"{TRAIN_JOB} JOB_COMPLETION_INDEX=3": Place(3, 0, 4, 1, "job-node-0-0.job", 29400),
    f"{TRAIN_JOB} {AGENT} {GIVEN}": Place(5, 1, 8, 2, "node1", 29500),
    f"JOB_COMPLETION_INDEX=2 {OPEN_MPI}": Place(1, 1, 2, 2, "127.0.0.1", HERE),
    "LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=1 LWS_LEADER_ADDRESS=a.b.c": Place(1, 0, 2, 1, "a.b.c", POD_PORT),
    "PET_NNODES=1 PET_NPROC_PER_NODE=auto": Place(0, 0, 1),
    "PET_NNODES=1 PET_NODE_RANK=0 JOB_COMPLETION_INDEX=0": Place(0, 0, 1),
    f"{TRAIN_JOB.replace('PER_NODE=1', 'PER_NODE=auto')} {GIVEN}": Place(5, 1, 8, 2, "node1", 29500),
    # clusters of TensorFlow: the chief comes first, also if it stands behind the workers
    WORKERS: Place(2, 0, 3, 1, "a", 2222),
    WORKERS.replace('worker","index":1', 'chief","index":0'): Place(0, 0, 3, 1, "a", 2222),
    ON_ONE_HOST: Place(1, 1, 2, 2, "localhost", 81),
    ON_ONE_HOST.replace('index":1', 'index":"1"'): Place(1, 1, 2, 2, "localhost", 81),
    ON_ONE_HOST.replace("localhost:", "[::1]:"): Place(1, 1, 2, 2, "::1", 81),
    'TF_CONFIG={"cluster":{"worker":["a:1"]},"task":{"type":"worker","index":0}}': Place(0, 0, 1),
    "TF_CONFIG={}": Place(0, 0, 1),
    "TF_CONFIG=": Place(0, 0, 1),
    f"{WORKERS} {AGENT} {GIVEN}": Place(5, 1, 8, 2, "node1", 29500),
    f"{WORKERS} {GIVEN}": Place(5, 1, 8, 2, "node1", 29500),
    f"{WORKERS} RANK=0 WORLD_SIZE=1": Place(0, 0, 1),
    # variables without a meaning here
    f"NODE_RANK=1 GROUP_RANK=1 GLOBAL_RANK=9 {GIVEN}": Place(5, 1, 8, 2, "node1", 29500),
    f"NODE_RANK=0 {OPEN_MPI}": Place(1, 1, 2, 2, "127.0.0.1", HERE),
}
WRONG = {
    "RANK=a WORLD_SIZE=2": "RANK='a': the launcher must give a whole number",
    "RANK=0 WORLD_SIZE=-1": "WORLD_SIZE='-1': the launcher must give a whole number of at least 0",
    "RANK=0 WORLD_SIZE=": r"WORLD_SIZE='' \(is a shell variable not set\?\)",
    GIVEN.replace("LOCAL_RANK=1", "LOCAL_RANK=1.5"): "LOCAL_RANK='1.5'",
    "RANK=0 WORLD_SIZE=0": "WORLD_SIZE=0: must be at least 1",
    GIVEN.replace("RANK=5", "RANK=8", 1): "RANK=8: WORLD_SIZE=8 ranks are numbered 0 to 7",
    "RANK=1 WORLD_SIZE=1": "RANK=1: WORLD_SIZE=1",
    "RANK=1": "RANK=1 without WORLD_SIZE.*for one process alone",
    "LOCAL_RANK=0": "LOCAL_RANK=0 without WORLD_SIZE",
    "WORLD_SIZE=8": "WORLD_SIZE=8 without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, which torchrun sets",
    GIVEN.replace("LOCAL_RANK=1 ", ""): "WORLD_SIZE=8 without LOCAL_RANK,",
    GIVEN.replace("node1", ""): "WORLD_SIZE=8 without MASTER_ADDR,",
    GIVEN.replace("29500", "auto"): "MASTER_PORT='auto' is not a port",
    GIVEN.replace("29500", "65536"): "MASTER_PORT='65536' is not a port",
    # launchers that do not tell enough
    "PALS_RANKID=0": "mpiexec of PALS set PALS_RANKID=0 without WORLD_SIZE.*RANK=0 WORLD_SIZE=1",
    "PMIX_RANK=1": "a PMIx launcher set PMIX_RANK=1 without WORLD_SIZE",
    "JOB_COMPLETION_INDEX=0": "an indexed Job of Kubernetes set JOB_COMPLETION_INDEX=0 without WORLD_SIZE",
    "JOB_COMPLETION_INDEX=1 OMPI_COMM_WORLD_SIZE=1": "an indexed Job",
    JOB.replace("MASTER_ADDR=job-0.job", ""): "WORLD_SIZE=4 without MASTER_ADDR, .*rank 0's host",
    OPEN_MPI.replace("SIZE=2", "SIZE=4", 1): "mpirun set OMPI_COMM_WORLD_SIZE=4 without MASTER_ADDR, MASTER_PORT,",
    STEP.replace("SLURM_STEP_NODELIST=n[08-10,12]", ""): "srun set SLURM_STEP_NUM_TASKS=8 without MASTER_ADDR,",
    TRAIN_JOB.replace("NNODES=4", "NNODES=1:4"): "PET_NNODES=1:4 is for torchrun",
    TRAIN_JOB.replace("PER_NODE=1", "PER_NODE=8"): "PET_NPROC_PER_NODE=8 is for torchrun",
    TRAIN_JOB.replace("PER_NODE=1", "PER_NODE=auto") + " RANK=3 WORLD_SIZE=32": (
        "PET_NPROC_PER_NODE=auto is for torchrun: start it in the pod"
    ),
    "HOROVOD_RANK=0": "horovodrun set HOROVOD_RANK=0 without WORLD_SIZE",
    HOROVOD.replace("SIZE=2", "SIZE=4", 1): "HOROVOD_SIZE=4 without MASTER_ADDR, MASTER_PORT,",
    ELASTIC: "HOROVOD_ELASTIC='1': horovodrun would replace ranks within the run; use torchrun's --nnodes MIN:MAX",
    # clusters of TensorFlow that are wrong
    f"{WORKERS} OMPI_COMM_WORLD_RANK=1": "OMPI_COMM_WORLD_RANK=1 disagrees with TF_CONFIG's rank=2",
    WITH_SERVERS: "cluster has 2 ps, but 0 of the ranks are servers: .*--num-servers 2, or leave ps out",
    WITH_SERVERS.replace('worker","index":1', 'evaluator","index":0'): "start env -u TF_CONFIG megalite-evaluate",
    WORKERS.replace('type":"worker', 'type":"tpu_worker'): "the task type 'tpu_worker'",
    WORKERS.replace('index":1', 'index":2'): "worker 2 as its task, but its cluster has 2",
    WORKERS.replace('index":1', 'index":-1'): "worker -1 as its task",
    WORKERS.replace('index":1', 'index":"2"'): "worker 2 as its task, but its cluster has 2",
    **{
        WORKERS.replace('index":1', f'index":{given}'): f"has {shown} as its 'index': expected a whole number"
        for given, shown in {"true": "True", '"one"': "'one'", '"-1"': "'-1'", '"1.0"': "'1.0'", '""': "''"}.items()
    },
    WORKERS.replace("c:2222", "b:2222"): "gives two tasks the same address",
    WORKERS.replace("c:2222", "c;id:2222"): "the address 'c;id:2222' of a worker: expected HOST:PORT",
    WORKERS.replace("c:2222", "c:70000"): "the address 'c:70000'",
    WORKERS.replace('"c:2222"', "7"): "the address 7 of a worker",
    WORKERS.replace('["a:2222"]', '"a:2222"'): "has 'a:2222' as its 'chief'",
    "TF_CONFIG=[]": "has no object around 'cluster'",
    "TF_CONFIG={": "TF_CONFIG is not JSON",
    f"TF_CONFIG={'[' * 2000}": "TF_CONFIG is not JSON",
    f"TF_CONFIG={'1' * 5000}": "TF_CONFIG is not JSON",
    "NODE_RANK=0": "NODE_RANK=0 without WORLD_SIZE.*RANK=0 WORLD_SIZE=1",
    "GROUP_RANK=1": "GROUP_RANK=1 without WORLD_SIZE",
    "GLOBAL_RANK=2": "GLOBAL_RANK=2 without WORLD_SIZE",
    "SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_STEP_ID=0": "srun set SLURM_NTASKS=8 without LOCAL_RANK, MASTER_ADDR",
    "SLURM_PROCID=3 SLURM_NTASKS=8": "srun set SLURM_NTASKS=8 without LOCAL_RANK, MASTER_ADDR",
    "SLURM_PROCID=0 SLURM_STEP_ID=0": "srun set SLURM_PROCID=0 without WORLD_SIZE",
    # two that contradict each other
    f"LOCAL_RANK=0 {OPEN_MPI}": "LOCAL_RANK=0 disagrees with OMPI_COMM_WORLD_LOCAL_RANK=1, which Open MPI's mpirun set",
    f"LOCAL_RANK=0 {STEP} CUDA_VISIBLE_DEVICES=0,1": "LOCAL_RANK=0 disagrees with SLURM_LOCALID=1",
    f"LOCAL_WORLD_SIZE=8 {OPEN_MPI}": "LOCAL_WORLD_SIZE=8 disagrees with OMPI_COMM_WORLD_LOCAL_SIZE=2",
    f"RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=8 {ADDRESS}": "LOCAL_WORLD_SIZE=8: there are only WORLD_SIZE=2",
    GIVEN.replace("LOCAL_RANK=1", "LOCAL_RANK=5"): "LOCAL_RANK=5: LOCAL_WORLD_SIZE=2 ranks are numbered 0 to 1",
    f"{STEP} {GIVEN.replace('RANK=5', 'RANK=1', 1)}": "RANK=1 disagrees with SLURM_PROCID=5, which srun set",
    f"{STEP} {GIVEN.replace('WORLD_SIZE=8', 'WORLD_SIZE=6', 1)}": "WORLD_SIZE=6 disagrees with SLURM_STEP_NUM_TASKS=8",
    f"{AGENTS} {GIVEN.replace('WORLD_SIZE=8', 'WORLD_SIZE=4', 1).replace('RANK=5', 'RANK=2', 1)}": (
        "RANK=2 disagrees with SLURM_PROCID=1"
    ),
    f"{STEP} {OPEN_MPI}": "OMPI_COMM_WORLD_RANK=1 disagrees with SLURM_PROCID=5",
    f"{OPEN_MPI} PMIX_RANK=0": "OMPI_COMM_WORLD_RANK=1 disagrees with PMIX_RANK=0",
    f"{TRAIN_JOB} JOB_COMPLETION_INDEX=2": "PET_NODE_RANK=3 disagrees with JOB_COMPLETION_INDEX=2",
    "WORLD_SIZE=1 PMI_SIZE=2": "WORLD_SIZE=1 disagrees with PMI_SIZE=2, which mpiexec set.*RANK=0 WORLD_SIZE=1",
}


def variables(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split())


def set_environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Set the variables of launchers in `text`, and delete those with which the tests themselves were started."""
    for name in (
        {name for case in PLACES | WRONG for name in variables(case)} | set(RANK_VARIABLES) | set(HOROVOD_SETTINGS)
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables(text).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launchers, "launcher_process", lambda _: 999)


@pytest.mark.parametrize("environment", PLACES)
def test_a_place_is_what_the_launcher_says(environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, environment)
    assert place_from_environment() == PLACES[environment]


@pytest.mark.parametrize("environment", WRONG)
def test_a_place_that_is_not_told_is_refused(environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, environment)
    with pytest.raises(ConfigurationError, match=WRONG[environment]):
        place_from_environment()


def test_servers_of_tensorflow_are_the_last_ranks_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, WITH_SERVERS.replace('type":"worker', 'type":"ps'))
    found = place_from_environment(with_servers=True)
    assert found == Place(4, 1, 5, 2, "a", 2222, servers=2)
    found.require_servers(2)
    with pytest.raises(ConfigurationError, match=r"has 2 ps, but 1 of the ranks .*--num-servers 2"):
        found.require_servers(1)


def test_settings_of_horovod_are_answered_with_flags_once_by_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place._warn.cache_clear()
    settings = "HOROVOD_TIMELINE=x.json HOROVOD_FUSION_THRESHOLD= HOROVOD_CYCLE_TIME=1"
    for rank, warnings in (
        (1, []),
        (0, ["warning: HOROVOD_TIMELINE changes nothing here: --profile --use-pytorch-profiler does"]),
    ):
        set_environment(monkeypatch, f"{HOROVOD.replace('RANK=1', f'RANK={rank}')} {settings}")
        place_from_environment()
        assert capsys.readouterr().err.splitlines() == warnings


@pytest.mark.parametrize(
    ("told", "others"),
    [
        (STEP.replace("PROCID=5", "PROCID=0"), "SLURM_STEP_NUM_TASKS=8, which srun set"),
        ("HOROVOD_RANK=0 HOROVOD_SIZE=2", "HOROVOD_SIZE=2, which horovodrun set"),
        (f"{STEP} {AGENT}".replace("PROCID=5", "PROCID=0"), "SLURM_STEP_NUM_TASKS=8, which srun set"),
        (STEP, None),  # one per job says it
        ("SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0", None),
        (f"{AGENT} PET_NNODES=1:4", None),
        ("PMI_RANK=x", None),
        (AGENT, None),
    ],
)
def test_many_processes_that_are_to_run_alone_say_so_once(
    told: str, others: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_environment(monkeypatch, f"RANK=0 WORLD_SIZE=1 {told}")
    place._warn.cache_clear()
    for _ in range(2):
        assert place_from_environment() == Place(0, 0, 1)
    warning = f"warning: RANK=0 WORLD_SIZE=1: each process runs alone, despite {others}"
    assert capsys.readouterr().err.splitlines() == ([warning] if others else [])


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[08-11,15],x1", "n08"),
        ("gpu-b,gpu-a", "gpu-b"),
        ("r[2-3]n[01-04].cluster,z", "r2n01.cluster"),
        ("a[3,5-9]", "a3"),
        ("", None),
    ],
)
def test_the_first_host_of_a_list_of_nodes(nodes: str, first: str | None) -> None:
    assert first_host(nodes) == first


def test_ports_differ_between_jobs_and_are_none_that_systems_hand_out() -> None:
    ports = {derived_port(str(job), "0", "") for job in range(100)}
    assert len(ports) > 95
    assert min(ports) >= 20000
    assert max(ports) < 30000


def test_ranks_of_one_mpiexec_find_its_process_also_through_scripts() -> None:
    program = "from megalite.process import launchers as l; print(l.launcher_process(['PMI_RANK']))"
    wrapped = ["bash", "-c", '"$0" -c "$1"; true', sys.executable, program]
    inside = ["bash", "-c", '"$@"; true', "bash", *wrapped]
    found = subprocess.run(inside, cwd=ROOT, env=os.environ | {"PMI_RANK": "0"}, capture_output=True, check=True)
    assert int(found.stdout) == os.getpid()


@pytest.mark.parametrize(
    ("environment", "rank"),
    [(STEP, 5), (f"{STEP} WORLD_SIZE=6", 5), ("RANK=3 WORLD_SIZE=4", 3), ("RANK=x", 0)],
)
def test_a_rank_that_is_refused_still_knows_how_long_to_wait_with_its_message(
    environment: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, environment)
    assert place_or_alone().rank == rank


@pytest.mark.parametrize(
    ("tool", "flags"),
    [("generate", "--load x"), ("evaluate", "--load x --text y"), ("doctor", "")],
)
def test_tools_that_use_ranks_refuse_to_be_alone_by_mistake(
    tool: str, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, "PMIX_RANK=0")
    ended = run_tool(tool, *flags.split())
    assert ended.code == 64
    assert "PMIX_RANK=0 without WORLD_SIZE" in ended.stderr


@pytest.mark.parametrize(
    "environment",
    [
        # Rank 1 waits ten seconds for the launcher to end it.
        pytest.param(f"{STEP} RANK=1".replace("PROCID=5", "PROCID=0"), marks=pytest.mark.wide),
        "RANK=a WORLD_SIZE=2",
    ],
)
def test_training_refuses_it_at_once_with_exit_code_64(environment: str, tmp_path: Path) -> None:
    with Job([ROOT / "pretrain_gpt.py"], 1, tmp_path, told=[variables(environment)]) as job:
        assert (job.wait(), job.stdout(0)) == ([64], "")
        assert job.stderr(0).startswith("error: ") or "error on rank 1: " in job.stderr(0)
        assert job.stderr(0).count("\n") == 1

"""Pods with several GPUs: torchrun in each gives the losses of one node, and each ends with the code of the ranks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from megalite.errors import EXIT_CONFIGURATION, EXIT_FATAL, EXIT_RESUMABLE
from megalite.process.launchers import POD_PORT
from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, ROOT, ended, iterations, latest_iteration, metrics, words
from tests.harness.job import Job, free_port
from tests.kubernetes.pods import documents, expanded, pods, trained_by_torchrun

MANIFESTS = documents(ROOT / "examples" / "kubernetes" / "jobset_gpus.yaml")
STEPS = 6
FLAGS = (*MOCK, *GPT2, *words(f"--train-iters {STEPS} --tp 2 --save-interval 1"))
PACED = ROOT / "tests" / "slurm" / "paced.py"


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of a training of four ranks on one node."""
    return trained_by_torchrun(FLAGS, tmp_path_factory.mktemp("torchrun"))


class Nodes:
    """Pods of the manifest as processes, with two ranks each; a context manager that ends them.

    Args:
        volume: what the pods find as /runs.
    """

    def __init__(self, volume: Path) -> None:
        self.volume, self.run, self.hold = volume, volume / "run", volume / "hold"
        self._port = free_port()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._files = ExitStack()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            self.signal_all_of(process, signal.SIGKILL)
            process.wait()
        self._files.close()

    def start(self, *flags: str, program: Path = PRETRAIN, attempt: int = 0) -> None:
        """Start all pods of an attempt, with more flags."""
        self._port = free_port()
        self._processes.clear()
        for index in range(len(pods(MANIFESTS).names)):
            self.start_pod(index, *flags, program=program, attempt=attempt)

    def start_pod(self, index: int, *flags: str, program: Path = PRETRAIN, attempt: int = 0) -> None:
        """Start a pod of an attempt, also in place of one that is lost."""
        made = pods(MANIFESTS)
        assert made.container["command"] == ["bash", "examples/kubernetes/pod.sh"]
        there = {
            made.names[0]: "127.0.0.1",
            "/runs/": f"{self.volume}/",
            f"--master-port={POD_PORT}": f"--master-port={self._port}",
            "--nproc-per-node=8": "--nproc-per-node=2",
            "pretrain_gpt.py": str(program),
            "_3": f"_{attempt}",
        }
        here = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOLD": str(self.hold), "PAUSE": "0.5"}
        here |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "SECONDS_FOR_FILE": "3"}
        here["SLURMD_NODENAME"] = made.names[index]  # a pod has a host name of its own
        told = made.environments[index]
        arguments = [_replaced(expanded(each, told), there) for each in made.container["args"]]
        output = self._files.enter_context((self.volume / f"pod{index}_{attempt}.log").open("ab"))
        self._processes[index] = subprocess.Popen(
            [*made.container["command"], *arguments, *flags],
            cwd=ROOT,
            env=os.environ | here | {key: _replaced(value, there) for key, value in told.items()},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def lose(self, index: int) -> None:
        """Kill all processes of a pod, as the loss of its node does."""
        found = [self._processes[index].pid]
        for each in found:
            found.extend(_children(each))
        for each in found:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self._processes[index].wait()

    def stop(self, index: int) -> None:
        """Send SIGTERM to the first process of a pod, as Kubernetes does."""
        self._processes[index].send_signal(signal.SIGTERM)

    def kill_rank(self, index: int) -> None:
        """Kill a rank of a pod."""
        agents = [each for each in _children(self._processes[index].pid) if _children(each)]
        os.kill(_children(agents[0])[0], signal.SIGKILL)

    @staticmethod
    def signal_all_of(process: subprocess.Popen[bytes], number: int) -> None:
        """Send a signal to each process of a pod; torchrun's ranks lead sessions of their own."""
        for each in (*(rank for child in _children(process.pid) for rank in _children(child)), process.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(os.getpgid(each), number)

    def codes(self, seconds: float = 150.0) -> list[int]:
        """Wait for all pods, and return their exit codes. Fails if they do not end in time."""
        self.until(lambda: all(process.poll() is not None for process in self._processes.values()), seconds)
        return [process.returncode for _, process in sorted(self._processes.items())]

    def until(self, condition: Callable[[], bool], seconds: float = 150.0) -> None:
        """Return when the condition holds. Fails if it does not in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def step(self) -> int:
        """Return the step of the newest checkpoint."""
        return latest_iteration(self.run) if (self.run / "latest_checkpointed_iteration.txt").exists() else 0

    def steps(self) -> int:
        """Return the number of steps that are finished."""
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def log(self) -> str:
        """Return the output of all pods."""
        return "\n".join(path.read_text() for path in sorted(self.volume.glob("pod*.log")))


def _replaced(text: str, there: dict[str, str]) -> str:
    for old, new in there.items():
        text = text.replace(old, new)
    return text


def _children(process: int) -> list[int]:
    with suppress(OSError):
        return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


@pytest.fixture
def nodes(torchrun: Path, tmp_path: Path) -> Iterator[Nodes]:
    shutil.copy(torchrun / "config.yaml", tmp_path / "run.yaml")
    with Nodes(tmp_path) as made:
        yield made


def test_exit_codes_decide_what_starts_again() -> None:
    made = pods(MANIFESTS)
    codes = [EXIT_CONFIGURATION, EXIT_FATAL]
    assert made.job["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": codes}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    assert "onJobFailureMessagePatterns" not in MANIFESTS["JobSet"]["spec"]["failurePolicy"]["rules"][0]
    assert made.job["template"]["spec"]["restartPolicy"] == "Never"
    grace = made.job["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace - 30 < int(made.environments[0]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace


def test_all_pods_of_an_attempt_and_no_others_share_a_file() -> None:
    first, second = (environment["MEGALITE_EXIT_FILE"] for environment in pods(MANIFESTS).environments)
    assert first == second == "/runs/ends/1f0c_3"


def test_the_manifest_starts_a_rank_for_each_gpu_of_each_pod() -> None:
    made = pods(MANIFESTS)
    gpus = made.container["resources"]["limits"]["nvidia.com/gpu"]
    assert made.container["args"][:2] == [f"--nnodes={len(made.names)}", f"--nproc-per-node={gpus}"]


@pytest.mark.wide_except('echo 93 >"$MEGALITE_EXIT_FILE"; exit 1-93')
@pytest.mark.parametrize(
    ("torchrun_does", "code"),
    [
        pytest.param("exit 3", 3, marks=pytest.mark.wide),
        ("exit 0", 0),
        ('echo 93 >"$MEGALITE_EXIT_FILE"; exit 1', EXIT_FATAL),
        pytest.param(  # of another node
            '{ sleep 1.5; echo 93 >"$MEGALITE_EXIT_FILE"; } & exit 1', EXIT_FATAL, marks=pytest.mark.wide
        ),
        pytest.param('echo 85 >"$MEGALITE_EXIT_FILE"; exit 0', 0, marks=pytest.mark.wide),
        ('trap "exit 1" TERM; kill -TERM $PPID; for _ in {1..50}; do sleep 0.1; done; exit 0', EXIT_RESUMABLE),
    ],
)
def test_a_pod_ends_with_the_code_in_the_file_or_torchruns(torchrun_does: str, code: int, tmp_path: Path) -> None:
    agent = tmp_path / "torchrun"
    agent.write_text(f"#!/usr/bin/env bash\n{torchrun_does}\n")
    agent.chmod(0o755)
    here = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SECONDS_FOR_FILE": "4" if "echo" in torchrun_does else "1"}
    here["MEGALITE_EXIT_FILE"] = str(tmp_path / "ends" / "exit")
    pod = subprocess.run(["bash", ROOT / "examples" / "kubernetes" / "pod.sh"], env=os.environ | here, timeout=60)
    assert pod.returncode == code


@pytest.mark.wide
@pytest.mark.parametrize("flags", ["wrong", "right"])
def test_the_run_is_that_of_one_node_and_wrong_flags_end_all_pods_with_64(
    flags: str, nodes: Nodes, torchrun: Path
) -> None:
    if flags == "wrong":
        nodes.start("--micro-batch-size", "3")
        assert nodes.codes() == [EXIT_CONFIGURATION] * 2, nodes.log()
        return
    nodes.start(attempt=1)
    assert nodes.codes() == [0, 0], nodes.log()
    assert metrics(nodes.run) == metrics(torchrun)


@pytest.mark.wide
@pytest.mark.parametrize("stopped", [0, 1])
def test_sigterm_to_one_pod_saves_and_ends_all_with_85(nodes: Nodes, torchrun: Path, stopped: int) -> None:
    nodes.hold.touch()
    nodes.start("--save-interval", "1000", program=PACED)
    nodes.until(lambda: "step 1/" in nodes.log())
    nodes.stop(stopped)
    assert nodes.codes() == [EXIT_RESUMABLE] * 2, nodes.log()
    assert nodes.step() == iterations(nodes.run)[-1] < STEPS
    nodes.start(attempt=0)  # a pod that takes the place of another one is too late
    assert nodes.codes(30.0) == [EXIT_RESUMABLE] * 2, nodes.log()
    nodes.start(attempt=1)
    assert nodes.codes() == [0, 0], nodes.log()
    assert metrics(nodes.run) == metrics(torchrun)


@pytest.mark.wide
def test_a_rank_that_is_killed_ends_all_pods_with_85(nodes: Nodes) -> None:
    nodes.hold.touch()
    nodes.start(program=PACED)
    nodes.until(lambda: "step 1/" in nodes.log())
    nodes.kill_rank(1)
    assert nodes.codes() == [EXIT_RESUMABLE] * 2, nodes.log()


@pytest.mark.wide
def test_an_elastic_run_goes_on_without_a_pod_and_with_the_one_in_its_place(tmp_path: Path) -> None:
    """The first pod goes on alone once the other is lost, and the pod that Kubernetes makes in its place joins it."""
    flags = [*FLAGS, *words("--global-batch-size 8 --bitwise-elastic --deterministic-mode --train-iters 100000")]
    flags += words("--save-interval 100000 --eval-iters 0 --lr-decay-style constant")
    more = [*flags, *words("--warm-restart --elastic --memory-checkpoint-interval 1")]
    (tmp_path / "run.yaml").write_text("{}\n")
    with Nodes(tmp_path) as nodes:
        nodes.start(*more)
        nodes.until(lambda: nodes.steps() > 3)
        nodes.lose(1)
        nodes.until(lambda: "; 2 ranks instead of 4, on " in nodes.log())
        nodes.start_pod(1, *more)
        nodes.until(lambda: "; 4 ranks instead of 2, on " in nodes.log())
        before = nodes.steps()
        nodes.until(lambda: nodes.steps() > before + 3)
        (nodes.run / "STOP").touch()
        assert nodes.codes() == [EXIT_RESUMABLE] * 2, nodes.log()
    with Job([PRETRAIN, *flags, "--exit-interval", before, "--save", tmp_path / "alone"], 2, tmp_path / "job") as job:
        ended(job, EXIT_RESUMABLE)
    assert [
        (record["consumed_samples"], record["lm_loss"], record["grad_norm"]) for record in metrics(nodes.run)[:before]
    ] == [
        (record["consumed_samples"], record["lm_loss"], record["grad_norm"]) for record in metrics(tmp_path / "alone")
    ]

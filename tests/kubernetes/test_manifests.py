"""The manifests in examples/kubernetes are valid, and their pods train as ranks of torchrun do."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.errors import EXIT_CONFIGURATION, EXIT_FATAL, EXIT_RESUMABLE
from megalite.process.launchers import POD_PORT
from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, ROOT, ended, metrics, words
from tests.harness.job import Job, free_port
from tests.kubernetes.schemas import problems

FILES = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
MAPS = {"requests", "limits", "selector", "labels", "annotations"}
"""Keys whose values are maps with any keys."""
FLAGS = (*MOCK, *GPT2, *words("--train-iters 2 --tp 2"))


def documents(path: Path) -> dict[str, dict[str, Any]]:
    """Return the manifests in a file by their kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}


@pytest.fixture(params=FILES, ids=[path.name for path in FILES])
def manifests(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    return documents(request.param)


# ---------------------------------------------------------------------------------------------------- the schemas


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to each key in a manifest."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        if isinstance(key, str):
            yield (*path, key)
        yield from places(each, (*path, key))


def holder(manifest: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        manifest = manifest[key]
    return manifest


def test_manifests_are_valid(manifests: dict[str, dict[str, Any]]) -> None:
    assert [problem for manifest in manifests.values() for problem in problems(manifest)] == []


def test_a_typo_in_any_key_and_a_value_of_another_type_are_found(manifests: dict[str, dict[str, Any]]) -> None:
    missed = []
    for kind, manifest in manifests.items():
        for path in places(manifest):
            if len(path) > 1 and path[-2] in MAPS:
                continue
            typo, wrong_type = copy.deepcopy(manifest), copy.deepcopy(manifest)
            of_typo, of_type = holder(typo, path), holder(wrong_type, path)
            of_typo[f"{path[-1]}s"] = of_typo.pop(path[-1])
            of_type[path[-1]] = 1.5
            if not problems(typo):
                missed.append(f"{kind}: a typo in {path}")
            if not problems(wrong_type):
                missed.append(f"{kind}: 1.5 in {path}")
    assert missed == []


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("completionMode",), "indexed", None),  # any text, by the schema
        (("podFailurePolicy", "rules", 0, "action"), "Failjob", None),
        (("podFailurePolicy", "rules", 1, "onPodConditions", 0, "type"), True, "is not of type string"),
        (("podFailurePolicy", "rules", 0, "onExitCodes", "values"), ["64"], "'64' is not of type integer"),
        (("template", "spec", "containers", 0, "env", 0, "value"), 4, "4 is not of type string"),
        (("template", "spec", "containers", 0, "lifecycle"), {}, "is not among the pinned ones"),
    ],
)
def test_what_is_wrong_is_told(path: tuple[Any, ...], value: Any, problem: str | None) -> None:
    manifest = documents(ROOT / "examples" / "kubernetes" / "indexed_job.yaml")["Job"]
    holder(manifest["spec"], path)[path[-1]] = value
    found = problems(manifest)
    assert (not found) if problem is None else (len(found) == 1 and problem in found[0])


# ---------------------------------------------------------------------------------------------------- the pods


@dataclass(frozen=True)
class Pods:
    """Pods that a controller makes of the manifests in a file."""

    job: dict[str, Any]
    """The specification of their Job."""
    container: dict[str, Any]
    environments: list[dict[str, str]]
    names: list[str]
    """Names by which they reach each other, by index."""


def pods(manifests: dict[str, dict[str, Any]]) -> Pods:
    """Do as the controllers of Job, JobSet and TrainJob do."""
    if "Job" in manifests:
        name, job = manifests["Job"]["metadata"]["name"], manifests["Job"]["spec"]
        service = manifests["Service"]
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"]
        assert job["template"]["spec"]["subdomain"] == service["metadata"]["name"]
        names = [f"{name}-{index}.{service['metadata']['name']}" for index in range(job["completions"])]
        return _pods(job, names, {})
    owner = manifests["JobSet" if "JobSet" in manifests else "TrainJob"]
    name = owner["metadata"]["name"]
    spec = owner["spec"] if "JobSet" in manifests else manifests["TrainingRuntime"]["spec"]["template"]["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = copy.deepcopy(replicated["template"]["spec"])
    assert spec["network"]["publishNotReadyAddresses"]
    assert spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    assert spec["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert job["backoffLimit"] == 0
    count = owner["spec"]["trainer"]["numNodes"] if "TrainJob" in manifests else job["completions"]
    names = [f"{name}-{replicated['name']}-0-{index}.{name}" for index in range(count)]
    if "JobSet" in manifests:
        rank_0 = spec["coordinator"]
        host = f"{name}-{rank_0['replicatedJob']}-{rank_0['jobIndex']}-{rank_0['podIndex']}.{name}"
        return _pods(job, names, {"jobset.sigs.k8s.io/coordinator": host})
    trainer = owner["spec"]["trainer"]
    assert owner["spec"]["runtimeRef"]["name"] == manifests["TrainingRuntime"]["metadata"]["name"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    container = job["template"]["spec"]["containers"][0]
    assert container["name"] == replicated["name"] == "node"
    told = {
        "PET_NNODES": str(count),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": str(POD_PORT),
    }
    env = [{"name": key, "value": value} for key, value in told.items()]
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container |= {"command": trainer["command"], "args": trainer["args"], "env": env}
    container["env"].append({"name": "PET_NODE_RANK", "valueFrom": index})
    return _pods(job | {"completions": count, "parallelism": count}, names, {})


def _pods(job: dict[str, Any], names: list[str], annotations: dict[str, str]) -> Pods:
    (container,) = job["template"]["spec"]["containers"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"] == len(names)
    environments = []
    for index in range(len(names)):
        own = annotations | {"batch.kubernetes.io/job-completion-index": str(index)}
        environment = {"JOB_COMPLETION_INDEX": str(index)}
        for entry in container["env"]:
            if "value" in entry:
                environment[entry["name"]] = entry["value"]
            else:
                found = re.fullmatch(r"metadata\.annotations\['(.*)'\]", entry["valueFrom"]["fieldRef"]["fieldPath"])
                assert found is not None
                environment[entry["name"]] = own[found[1]]
        environments.append(environment)
    return Pods(job, container, environments, names)


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of a training of four ranks under torchrun's variables."""
    folder = tmp_path_factory.mktemp("torchrun")
    with Job([PRETRAIN, *FLAGS, "--save", folder / "run"], 4, folder / "job") as job:
        ended(job)
    return folder / "run"


def test_pods_run_as_processes_give_torchruns_losses(
    manifests: dict[str, dict[str, Any]], torchrun: Path, tmp_path: Path
) -> None:
    made = pods(manifests)
    shutil.copy(torchrun / "config.yaml", tmp_path / "run.yaml")
    port = str(free_port())  # which here is not theirs alone
    told = [
        {name: "127.0.0.1" if value == made.names[0] else value for name, value in environment.items()}
        | ({"PET_MASTER_PORT": port} if "PET_MASTER_PORT" in environment else {"MASTER_PORT": port})
        for environment in made.environments
    ]
    assert all("127.0.0.1" in environment.values() for environment in told)
    assert made.container["command"] == ["python", PRETRAIN.name]
    arguments = [each.replace("/runs/", f"{tmp_path}/") for each in made.container["args"]]
    with Job([PRETRAIN, *arguments], len(told), tmp_path / "job", told=told) as job:
        ended(job)
    assert metrics(tmp_path / "run") == metrics(torchrun)


def test_exit_codes_decide_what_starts_again(manifests: dict[str, dict[str, Any]]) -> None:
    made = pods(manifests)
    assert made.job["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": _codes(made, EXIT_CONFIGURATION, EXIT_FATAL)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _codes(made, EXIT_RESUMABLE)},
    ]
    assert made.job["template"]["spec"]["restartPolicy"] == "Never"


def _codes(made: Pods, *codes: int) -> dict[str, Any]:
    return {"containerName": made.container["name"], "operator": "In", "values": list(codes)}


def test_pods_have_the_run_directory_memory_to_share_and_time_to_save(manifests: dict[str, dict[str, Any]]) -> None:
    made = pods(manifests)
    spec = made.job["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in made.container["volumeMounts"]}
    claim = manifests["PersistentVolumeClaim"]["metadata"]["name"]
    assert mounts["/runs"]["persistentVolumeClaim"]["claimName"] == claim
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    assert made.container["args"][-4:] == ["--save", "/runs/run", "--resume", "auto"]
    assert spec["terminationGracePeriodSeconds"] >= 120

"""The manifests in examples/kubernetes are valid, and their pods train as ranks of torchrun do."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalite.errors import EXIT_CONFIGURATION, EXIT_FATAL
from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, ROOT, ended, metrics, words
from tests.harness.job import Job, free_port
from tests.kubernetes.pods import Pods, documents, pods, trained_by_torchrun
from tests.kubernetes.schemas import problems

FOLDER = ROOT / "examples" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
JOBS = [path for path in FILES if path.name != "claim.yaml"]
ALONE = [path for path in JOBS if path.name != "jobset_gpus.yaml"]
"""Manifests whose pods are one rank each; test_gpus.py has the other."""
MAPS = {"requests", "limits", "selector", "labels", "annotations"}
"""Keys whose values are maps with any keys."""
FLAGS = (*MOCK, *GPT2, *words("--train-iters 2 --tp 2"))


@pytest.fixture(params=FILES, ids=[path.name for path in FILES])
def manifests(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    return documents(request.param)


@pytest.fixture(params=JOBS, ids=[path.name for path in JOBS])
def jobs(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    return documents(request.param)


@pytest.fixture(params=ALONE, ids=[path.name for path in ALONE])
def alone(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
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
            of_type[path[-1]] = [1.5]
            if not problems(typo):
                missed.append(f"{kind}: a typo in {path}")
            if not problems(wrong_type):
                missed.append(f"{kind}: [1.5] in {path}")
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
    manifest = documents(FOLDER / "indexed_job.yaml")["Job"]
    holder(manifest["spec"], path)[path[-1]] = value
    found = problems(manifest)
    assert (not found) if problem is None else (len(found) == 1 and problem in found[0])


# ---------------------------------------------------------------------------------------------------- the pods


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of a training of four ranks under torchrun's variables."""
    return trained_by_torchrun(FLAGS, tmp_path_factory.mktemp("torchrun"))


@pytest.mark.parametrize(
    "alone",
    [pytest.param(path, id=path.name, marks=[pytest.mark.wide] * (path.name != "indexed_job.yaml")) for path in ALONE],
    indirect=True,
)
def test_pods_run_as_processes_give_torchruns_losses(
    alone: dict[str, dict[str, Any]], torchrun: Path, tmp_path: Path
) -> None:
    made = pods(alone)
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


def test_exit_codes_decide_what_starts_again(alone: dict[str, dict[str, Any]]) -> None:
    made = pods(alone)
    assert made.job["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": _codes(made, EXIT_CONFIGURATION, EXIT_FATAL)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]  # whatever else ends a pod counts, also EXIT_RESUMABLE: its cause may last
    assert made.job["template"]["spec"]["restartPolicy"] == "Never"


def _gibibytes(size: str) -> int:
    assert size.endswith("Gi")
    return int(size.removesuffix("Gi"))


def _codes(made: Pods, *codes: int) -> dict[str, Any]:
    return {"containerName": made.container["name"], "operator": "In", "values": list(codes)}


def test_deleting_a_job_deletes_no_checkpoints(jobs: dict[str, dict[str, Any]]) -> None:
    assert "PersistentVolumeClaim" not in jobs


def test_pods_have_the_run_directory_memory_to_share_and_time_to_save(jobs: dict[str, dict[str, Any]]) -> None:
    made = pods(jobs)
    spec = made.job["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in made.container["volumeMounts"]}
    claim = documents(FOLDER / "claim.yaml")["PersistentVolumeClaim"]
    assert mounts["/runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    requests, shared = made.container["resources"]["requests"], mounts["/dev/shm"]["emptyDir"]
    assert int(requests["cpu"]) >= made.container["resources"]["limits"]["nvidia.com/gpu"]
    assert shared["medium"] == "Memory"
    assert 0 < _gibibytes(shared["sizeLimit"]) < _gibibytes(requests["memory"])
    assert spec["shareProcessNamespace"]  # so that the program's ID isn't 1
    assert made.container["args"][-4:] == ["--save", "/runs/run", "--resume", "auto"]
    assert spec["terminationGracePeriodSeconds"] >= 120

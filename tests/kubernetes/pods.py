"""Pods that the controllers of Kubernetes make of the manifests in examples/kubernetes."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megalite.process.launchers import POD_PORT
from tests.end_to_end.runs import PRETRAIN, ended
from tests.harness.job import Job

RULE_NAME = "[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"
"""Names that the webhook of JobSet accepts for a rule; its schema accepts any."""


def trained_by_torchrun(flags: Sequence[str], folder: Path) -> Path:
    """Train on four ranks of one node under torchrun's variables. Returns the run directory."""
    with Job([PRETRAIN, *flags, "--save", folder / "run"], 4, folder / "job") as job:
        ended(job)
    return folder / "run"


def documents(path: Path) -> dict[str, dict[str, Any]]:
    """Return the manifests in a file by their kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}


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
        assert 20 < job["backoffLimit"] / job["completions"] < 1000
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
    assert all(re.fullmatch(RULE_NAME, rule["name"]) for rule in spec["failurePolicy"]["rules"])
    (last,) = spec["failurePolicy"]["rules"]  # all else restarts the JobSet, and counts
    assert (last["action"], last["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert job["backoffLimit"] == 0
    assert 20 < spec["failurePolicy"]["maxRestarts"] < 1000
    count = owner["spec"]["trainer"]["numNodes"] if "TrainJob" in manifests else job["completions"]
    names = [f"{name}-{replicated['name']}-0-{index}.{name}" for index in range(count)]
    if "JobSet" in manifests:
        rank_0 = spec["coordinator"]
        host = f"{name}-{rank_0['replicatedJob']}-{rank_0['jobIndex']}-{rank_0['podIndex']}.{name}"
        told = {"coordinator": host, "jobset-uid": "1f0c", "restart-attempt": "3"}
        return _pods(job, names, {f"jobset.sigs.k8s.io/{key}": value for key, value in told.items()})
    trainer = owner["spec"]["trainer"]
    assert owner["spec"]["runtimeRef"]["name"] == manifests["TrainingRuntime"]["metadata"]["name"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    container = job["template"]["spec"]["containers"][0]
    assert container["name"] == replicated["name"] == "node"
    variables = {
        "PET_NNODES": str(count),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": str(POD_PORT),
    }
    env = [{"name": key, "value": value} for key, value in variables.items()]
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container |= {"command": trainer["command"], "args": trainer["args"], "env": env}
    container["resources"] = trainer["resourcesPerNode"]
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
                environment[entry["name"]] = expanded(entry["value"], environment)
            else:
                found = re.fullmatch(r"metadata\.annotations\['(.*)'\]", entry["valueFrom"]["fieldRef"]["fieldPath"])
                assert found is not None
                environment[entry["name"]] = own[found[1]]
        environments.append(environment)
    return Pods(job, container, environments, names)


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """Return a text with the values of variables, $(NAME), as Kubernetes gives a container its values and arguments."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], text)

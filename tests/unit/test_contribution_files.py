"""Files for contributors: they do the same as the Makefile, and name only versions that were tried."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.environments import ENVIRONMENTS

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_hooks_of_a_commit_run_what_make_lint_runs() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2]
    commands = re.findall(r"^\t(\.venv/bin/.+)$|\t(shellcheck --[\w-]+)", recipe, re.MULTILINE)
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    assert [hook["entry"] for hook in local["hooks"]] == ["".join(each) for each in commands]


def test_the_workflow_runs_the_one_script_on_the_versions_that_were_tried() -> None:
    (job,) = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    given = {name: value for step in job["steps"] for name, value in step.get("with", {}).items()}
    assert given["python-version"].split()[-1] == "3.11"
    assert {each.python for each in ENVIRONMENTS} - {""} <= set(given["python-version"].split())
    assert given["fetch-depth"] == 0
    assert job["name"] == "Python 3.11, torch 2.13"
    assert "\nTORCH = torch==2.13.0\n" in (ROOT / "Makefile").read_text()


def test_the_ends_of_the_promised_range_are_tried() -> None:
    """Compare the versions of torch and of Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tried = {each.torch.rpartition(".")[0] for each in ENVIRONMENTS}
    assert tried >= {"2.11", "2.14"}
    assert "torch>=2.11,<2.15" in project["dependencies"]
    pythons = {each.rpartition(" ")[2] for each in project["classifiers"] if "Language :: Python" in each}
    assert pythons == {"3.11"} | {each.python for each in ENVIRONMENTS} - {""}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= form.keys()
    ids = [each["id"] for each in form["body"]]
    assert len(set(ids)) == len(ids)
    for each in form["body"]:
        assert each["type"] in ("input", "textarea", "dropdown")
        assert each["attributes"]["label"]
        assert ("options" in each["attributes"]) == (each["type"] == "dropdown")


def test_forms_ask_for_a_bug_a_feature_and_a_wrong_number() -> None:
    assert [path.stem for path in FORMS] == ["bug", "feature", "wrong_number"]

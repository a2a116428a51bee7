"""A branch begins with a checkpoint of another run and says so; the recipe of docs/checkpoints.md anneals from one."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import (
    GPT2,
    MOCK,
    PRETRAIN,
    ROOT,
    Run,
    assert_same_checkpoint,
    ended,
    iterations,
    metrics,
    words,
)
from tests.harness.job import Job, run_script

FLAGS = (*GPT2, "--lr-warmup-iters", "1")
SCALE = 10_000
"""Steps of the page's commands for one of this test."""


def recipe() -> list[list[str]]:
    """Return the commands of the page, with few steps, as words after `python`."""
    page = (ROOT / "docs/checkpoints.md").read_text()
    block = re.search(r"```bash\n(FLAGS=.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    text = re.sub(r"\d+0000\b", lambda number: str(int(number[0]) // SCALE), block[1].replace("\\\n", ""))
    return [shlex.split(line)[1:] for line in text.splitlines()[1:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the two runs of the page's recipe, and the page that compares them."""
    folder = tmp_path_factory.mktemp("recipe")
    trunk, branch, report = recipe()
    for number, (program, first, *rest) in enumerate((trunk, branch)):
        assert (program, first) == ("pretrain_gpt.py", "$FLAGS")
        argv: list[Any] = [PRETRAIN, *MOCK, *FLAGS, *(each.replace("run/", f"{folder}/run/") for each in rest)]
        with Job(argv, 1, folder / f"job{number}") as job:
            (folder / f"out{number}").write_text(ended(job).stdout)
    program, *rest = report
    run_script([ROOT / program, *(each.replace("run/", f"{folder}/run/") for each in rest)], folder)
    return folder


def step(directory: Path, number: int) -> Path:
    return directory / f"iter_{number:07d}"


def parents(directory: Path, number: int) -> Any:
    manifest = json.loads((step(directory, number) / "manifest.json").read_text())
    return manifest["config"].get("parents", {}).get("runs")


def rates(directory: Path) -> list[float]:
    return [line["learning_rate"] for line in metrics(directory) if "lm_loss" in line]


def test_the_recipe_anneals_from_a_step_of_the_plateau(folder: Path) -> None:
    trunk, annealed = folder / "run/trunk", folder / "run/annealed"
    assert rates(trunk) == pytest.approx([0.0, *[1e-2] * 5]), "its own decay would begin with the seventh step"
    assert iterations(annealed) == [5, 6, 7]
    fall = [1.0 - (passed / 3) ** 0.5 for passed in range(3)]
    assert rates(annealed) == pytest.approx([1e-2 * height for height in fall]), "from the plateau, by 1 - sqrt"
    out = (folder / "out1").read_text()
    assert f"new, a branch of {trunk} from step 4 (16 samples)" in " ".join(out.split())
    assert "learning rate 0.01 ->" not in out, "nothing jumps"
    assert "WARNING" not in out
    assert parents(annealed, 7) == [{"run": str(trunk), "step": 4, "samples": 16}]
    (line,) = map(json.loads, (annealed / "ledger.jsonl").read_text().splitlines())
    assert (line["step"], line["kind"], line["samples"], line["outcome"]) == (5, "branch", [[0, 15]], "trained")
    assert line["why"] == f"a branch of {trunk} from step 4 (16 samples)"
    assert f"annealed: This run is {line['why']}." in (trunk / "report.html").read_text()
    assert parents(trunk, 6) is None
    assert not (trunk / "ledger.jsonl").exists()


def test_a_branch_with_the_same_flags_is_the_run_itself(run: Run, folder: Path, tmp_path: Path) -> None:
    trunk, new, other = folder / "run/trunk", tmp_path / "new", tmp_path / "other"
    same = [*FLAGS, *words("--lr-decay-style WSD --lr-wsd-decay-iters 1 --save-interval 1")]
    ends = [*same, "--train-iters", 6, "--branch-from", f"{trunk}@4", "--save", new, "--resume", "auto"]
    run(*ends, "--exit-interval", 5, expected=85)
    out = " ".join(run(*ends).stdout.split())
    assert f"continues from {step(new, 5)}; a branch of {trunk} from step 4" in out, "its own checkpoint comes first"
    assert "WARNING" not in out
    assert metrics(new) == [line for line in metrics(trunk) if line["iteration"] > 4]
    assert_same_checkpoint(step(new, 6), step(trunk, 6))
    assert len((new / "ledger.jsonl").read_text().splitlines()) == 1
    run(*same, "--train-iters", 7, "--branch-from", f"{new}@latest", "--save", other)
    assert [(each["run"], each["step"]) for each in parents(other, 7)] == [(str(new), 6), (str(trunk), 4)]
    error = run(*ends[:-4], "--save", other, expected=64).stderr
    assert f"--save {other} has iter_0000007 of an earlier run" in error
    error = run(*same, "--train-iters", 7, "--branch-from", f"{trunk}@3", "--save", tmp_path / "3", expected=64).stderr
    assert f"--branch-from {trunk}@3: {trunk} has only steps 2, 4, 6" in error
    error = run(*same, "--train-iters", 7, "--branch-from", f"{folder}/none@3", "--save", other, expected=64).stderr
    assert f"--branch-from {folder}/none is no folder" in error

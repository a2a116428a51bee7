"""A folder without a checkpoint is refused before torch is imported, and folders near it that have one are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megalite.config import CheckpointConfig, near_checkpoints
from megalite.config.near_checkpoints import no_checkpoint, require_checkpoint, require_load
from megalite.config.parse import parse_arguments
from megalite.errors import ConfigurationError
from megalite.parallel.mesh import ParallelMesh
from megalite.training.resume import find_resume_point
from tests.end_to_end.runs import GPT2, MOCK, ROOT
from tests.harness.tool import run_tool


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder with two runs, a Hugging Face folder, and folders without checkpoints."""
    for run in ("small-llama", "7b"):
        checkpoint = tmp_path / "runs" / run / "iter_0000300"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").touch()
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "model.safetensors").touch()
    (tmp_path / "runs" / "logs").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("load", "named"),
    [
        ("runs/small-lama", "runs/small-llama, runs/7b"),  # beside it, the most alike first
        ("runs", "runs/7b, runs/small-llama, exported"),  # below it, and beside it
        ("runs/logs", "runs/7b, runs/small-llama"),
        ("rnus/small-llama", "runs/small-llama, runs/7b, exported"),  # beside the parent that does not exist
        ("runs/7b/iter_0000301", "runs/7b"),
        ("exported/model.safetensors", "exported"),
    ],
)
def test_near_folders_with_checkpoints_are_named(
    runs: Path, load: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    with pytest.raises(ConfigurationError, match=rf"--load {load} (has no checkpoint|is no folder); there are some in"):
        require_checkpoint(load)
    assert no_checkpoint(load).endswith(f"there are some in {named}")


def test_a_run_without_a_network_names_them_too(runs: Path) -> None:
    flags = ["--micro-batch-size", "1", "--seq-length", "8", "--lr", "1e-4", "--train-iters", "1"]
    told = rf"missing: --num-layers.*\n\(--load {runs}/runs/8b is not a folder; there are checkpoints in {runs}/runs/7b"
    with pytest.raises(ConfigurationError, match=told):
        parse_arguments([*flags, "--load", f"{runs}/runs/8b"])


def test_a_run_needs_what_it_loads_unless_it_saves_there(runs: Path) -> None:
    none, good = str(runs / "none"), str(runs / "runs" / "7b")
    for taken in (
        CheckpointConfig(load=none, save=f"{runs}/./none"),
        CheckpointConfig(load=good),
        CheckpointConfig(load=f"{good}/iter_0000300"),
        CheckpointConfig(load="s3://bucket/run"),
        CheckpointConfig(load=none, save=good, resume="auto"),
    ):
        require_load(taken)
    for refused in (
        CheckpointConfig(load=none),
        CheckpointConfig(load=none, save=good),
        CheckpointConfig(load=none, save=str(runs / "new"), resume="auto"),
    ):
        with pytest.raises(ConfigurationError, match="is no folder; there are some in"):
            require_load(refused)


def test_a_folder_that_only_looks_like_a_run_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "run" / "iter_0000300").mkdir(parents=True)
    settings = CheckpointConfig(load=str(tmp_path / "run"))
    require_load(settings)
    with pytest.raises(ConfigurationError, match="run has no checkpoint: give the --save of a training"):
        find_resume_point(settings, ParallelMesh())
    same = CheckpointConfig(load=str(tmp_path / "run"), save=str(tmp_path / "run"))
    assert find_resume_point(same, ParallelMesh()).candidates.paths == ()


def test_odd_paths_are_refused_alike(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for load in (tmp_path / "file", tmp_path / ("x" * 300), "a\0b"):
        with pytest.raises(ConfigurationError):
            require_checkpoint(str(load))


@pytest.mark.wide_except("pretrain")
@pytest.mark.parametrize("command", ["pretrain", "generate", "evaluate", "reshard"])
def test_the_answer_needs_no_torch(command: str, runs: Path) -> None:
    flags = {
        "pretrain": [*MOCK, *GPT2, "--train-iters", "1"],
        "generate": ["--prompt", "a"],
        "evaluate": ["--text", "a.txt"],
        "reshard": ["--save", "b", "--files", "1"],
    }[command]
    code = (
        f"import sys; sys.argv = ['x', *{[*map(str, flags)]}, '--load', 'runs']; sys.modules['torch'] = None\n"
        f"from megalite.commands.{command} import command; command()"
    )
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    ended = subprocess.run([sys.executable, "-c", code], cwd=runs, env=path, capture_output=True, text=True)
    assert ended.returncode == 64, ended.stderr
    assert (
        ended.stderr == "error: --load runs has no checkpoint; there are some in runs/7b, runs/small-llama, exported\n"
    )


def test_a_conversion_names_near_folders_too(runs: Path) -> None:
    flags = ("--loader", "megalite", "--saver", "hf", "--save-dir", runs / "out")
    refused = run_tool("convert", *flags, "--load-dir", runs / "run" / "7b")
    assert refused.code == 93
    assert f"error: --load-dir {runs}/run/7b is no folder; there are some in {runs}/runs/7b, " in refused.stderr


def test_a_search_that_takes_long_ends(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_checkpoints, "_SECONDS", -1.0)
    assert no_checkpoint(str(runs / "runs/small-lama")).endswith("is no folder: give the --save of a training")

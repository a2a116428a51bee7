"""A run directory on an object store: several ranks save to it; it is resumed, loaded into another run and
inspected."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.runs import FAMILIES, Run, Start, assert_same_checkpoint, iterations, latest_iteration, metrics
from tests.harness.object_store import ObjectStore
from tests.harness.tool import run_tool

GPT2 = (*FAMILIES["gpt2"], "--train-iters", 4, "--save-interval", 2)
ZERO = ("--use-distributed-optimizer",)


def test_a_run_is_saved_to_a_url_and_goes_on_from_it(run: Run, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    url, whole = f"{ObjectStore.protocol}://{bucket}/run", tmp_path / "whole"
    run(*GPT2, *ZERO, "--save", whole, world_size=2)
    flags = (*GPT2, *ZERO, "--save", url, "--resume", "auto")
    first = run(*flags, "--exit-interval", 2, world_size=2, expected=85)
    assert f"note: {url} is an object store, without locks" in first.stdout
    assert f"saved {url}/iter_0000002" in first.stdout
    assert {path.name for path in (bucket / "run").iterdir()} == {
        "config.yaml",
        "iter_0000002",
        "latest_checkpointed_iteration.txt",
        "metrics.jsonl",
    }
    second = run(*flags, world_size=2)
    assert f"continues from {url}/iter_0000002" in second.stdout
    assert f"everything is in {url}" in second.stdout
    assert latest_iteration(bucket / "run") == 4
    for iteration in (2, 4):
        assert_same_checkpoint(bucket / f"run/iter_000000{iteration}", whole / f"iter_000000{iteration}")
    assert (bucket / "run/DONE").read_text() == "4\n"
    assert metrics(bucket / "run") == metrics(whole)

    other = run(*GPT2, "--train-iters", 5, "--load", url, "--save", tmp_path / "other", world_size=1)
    assert f"continues from {url}/iter_0000004" in other.stdout
    found = run_tool("inspect_checkpoint", "--load", url, "--verify")
    assert "every byte is as it was written" in found.stdout


@pytest.mark.wide
def test_a_killed_run_goes_on_and_its_metrics_are_there(start: Start, run: Run, tmp_path: Path) -> None:
    flags = (*FAMILIES["gpt2"], "--train-iters", 10_000, "--save", f"{ObjectStore.protocol}://{tmp_path}/run")
    job = start(*flags, "--save-interval", 2)
    job.wait_for_output(0, "step     3/")
    job.kill(0)
    assert job.wait() == [-9]
    saved = latest_iteration(tmp_path / "run")
    assert iterations(tmp_path / "run")[:2] == [1, 2]
    run(*flags, "--resume", "auto", "--exit-interval", 1, expected=85)
    assert iterations(tmp_path / "run") == list(range(1, saved + 2))

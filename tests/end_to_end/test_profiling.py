"""Traces of steps, requested by flags or by a file, that another program can read."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

from tests.end_to_end.runs import GPT2, Run, Start, ended, losses, words

PIPELINE = (*GPT2, "--micro-batch-size", "1", "--pp", "2", "--train-iters", "6")
BY_TORCH = words("--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4")


def names(path: Path) -> list[str]:
    """Return the names of all events in a trace."""
    with gzip.open(path) as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


@pytest.mark.wide
@pytest.mark.parametrize("place", ["--save", pytest.param("--tensorboard-dir", marks=pytest.mark.wide)])
def test_chosen_steps_of_chosen_ranks_are_traced_by_flags(place: str, run: Run, tmp_path: Path) -> None:
    flags = ["--profile-ranks", 0, 1, "--pytorch-profiler-collect-shapes", place, tmp_path]
    out = run(*PIPELINE, *BY_TORCH, *flags, world_size=2).stdout
    stem = tmp_path / "profile" / "step_0000003-0000004_rank_"
    assert f"profiled steps 3 to 4 on rank {{0,1}}: {stem}{{0,1}}.json.gz" in out
    assert sorted((tmp_path / "profile").iterdir()) == [Path(f"{stem}{rank}.json.gz") for rank in (0, 1)]
    for rank in (0, 1):
        found = names(Path(f"{stem}{rank}.json.gz"))
        assert [f"step {number}" in found for number in (2, 3, 4, 5)] == [False, True, True, False]
        assert {"data", "forward and backward", "optimizer", "B of micro-batch 3, chunk 0"} <= set(found)
        assert found.count("F of micro-batch 0, chunk 0") == 2
        peer = (
            "receive F of micro-batch 1, chunk 0 from rank 0" if rank else "send F of micro-batch 1, chunk 0 to rank 1"
        )
        assert peer in found
        assert any("addmm" in name for name in found)
        with gzip.open(f"{stem}{rank}.json.gz") as file:
            assert b"Input Dims" in file.read()


@pytest.mark.wide
def test_a_file_asks_for_the_next_steps(start: Start, tmp_path: Path) -> None:
    flags = [*GPT2, "--train-iters", 10000, "--pytorch-profiler-collect-callstack", "--save", tmp_path]
    (tmp_path / "PROFILE").touch()  # of an earlier run
    job = start(*flags, world_size=2)
    job.wait_for_output(0, "step     2/10000")
    for count in (1, 2):
        (tmp_path / "PROFILE").touch()
        deadline = time.monotonic() + 120
        while job.stdout(0).count("profiled steps") < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert not (tmp_path / "PROFILE").exists()
    (tmp_path / "STOP").touch()
    out = ended(job, expected=85).stdout
    assert f"removed {tmp_path / 'PROFILE'}" in out
    traces = sorted((tmp_path / "profile").iterdir())
    assert len(traces) == 2
    for path in traces:
        assert f"on rank 0: {path}" in out
        first = int(path.name[5:12])
        assert path.name == f"step_{first:07d}-{first + 2:07d}_rank_0.json.gz"
        found = names(path)
        assert [f"step {first + number}" in found for number in (-1, 0, 1, 2, 3)] == [False, True, True, True, False]
        assert any("trainer.py" in name for name in found)  # the call stack
        assert not any("(0): " in name for name in found)  # of a module's import, whose name is freed by then


def test_a_profile_changes_nothing_and_one_that_cannot_be_written_is_told(run: Run, tmp_path: Path) -> None:
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    run(*PIPELINE, "--save", plain, world_size=2)
    profiled.mkdir()
    (profiled / "profile").touch()
    out = run(*PIPELINE, *BY_TORCH, "--save", profiled, world_size=2).stdout
    assert "WARNING: writing the profile of steps 3 to 4 failed on rank 0: " in out
    assert losses(profiled) == losses(plain)


@pytest.mark.wide
def test_steps_that_have_gone_by_are_told(run: Run, tmp_path: Path) -> None:
    flags = [*GPT2, "--lr-decay-style", "constant", "--save", tmp_path, "--resume", "auto"]
    run(*flags, "--train-iters", 3)
    out = run(*flags, *BY_TORCH, "--train-iters", 5).stdout
    assert "--profile-step-start 2: nothing is profiled, since the run continues after step 3" in out
    assert not (tmp_path / "profile").exists()


@pytest.mark.wide
def test_a_run_that_ends_within_a_profile_ends_as_any_other(run: Run, tmp_path: Path) -> None:
    flags = [*BY_TORCH, "--profile-step-end", 9, "--exit-interval", 4, "--train-iters", 9, "--save", tmp_path]
    assert "stopped after step 4" in run(*GPT2, *flags, expected=85).stdout
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--profile --train-iters 20",
            "--profile marks steps for nsys, which profiles GPUs, but this run is on the",
        ),
        ("--record-memory-history --train-iters 1", "--record-memory-history records GPU memory, but this run"),
    ],
)
def test_what_only_gpus_have_is_refused_on_a_cpu(flags: str, told: str, run: Run) -> None:
    error = run(*GPT2, *words(flags), expected=64).stderr
    assert error.startswith(f"error: {told}")
    assert error.count("error") == 1

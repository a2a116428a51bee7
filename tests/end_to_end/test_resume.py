"""Stopping and resuming changes nothing: I8, to the bit on the same layout; I9, to rounding on another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import (
    FAMILIES,
    Run,
    assert_same_checkpoint,
    iterations,
    latest_iteration,
    metrics,
    saved_tensors,
)
from tests.harness.close import assert_parameter_close
from tests.harness.covering_array import Row, covering_array, every_value_once

STEPS = 4
BROKEN_AT = 2

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
FACTORS = {
    "family": ("gpt2", "llama"),
    "tensor_parallel": (1, 2),
    "data_parallel": (1, 2),
    "sequence_parallel": (False, True),
    "zero": (0, 1, 2, 3),
    "overlap": (False, True),
    "dropout": (0.0, 0.1),
    "precision": ("fp32", "bf16", "fp16", "fp64"),
    "optimizer": ("adam", "sgd"),
}


def valid(row: Row) -> bool:
    return (not row["sequence_parallel"] or row["tensor_parallel"] > 1) and (not row["overlap"] or row["zero"] > 0)


ROWS = covering_array(FACTORS, valid)


def layout_flags(row: Mapping[str, Any]) -> list[str]:
    found = ["--tp", str(row["tensor_parallel"])]
    found += ["--sequence-parallel"] * row["sequence_parallel"]
    found += ["--data-parallel-sharding-strategy", STRATEGIES[row["zero"]]]
    if row["overlap"]:
        found += ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "1000"]
    return found


def row_flags(row: Row) -> list[str]:
    found = [*FAMILIES[row["family"]], *layout_flags(row), "--optimizer", row["optimizer"]]
    found += ["--hidden-dropout", str(row["dropout"]), "--attention-dropout", str(row["dropout"])]
    return found + ([] if row["precision"] == "fp32" else [f"--{row['precision']}"])


def name(row: Row) -> str:
    layout = f"tp{row['tensor_parallel']}dp{row['data_parallel']}zero{row['zero']}"
    marks = "-sp" * row["sequence_parallel"] + "-overlap" * row["overlap"] + "-dropout" * (row["dropout"] > 0)
    return f"{row['family']}-{layout}{marks}-{row['precision']}-{row['optimizer']}"


FEW = [row for row in every_value_once(ROWS) if row["tensor_parallel"] == 1]
"""Rows of `make test`; test_stop.py resumes tensor-parallel runs."""


@pytest.mark.bits
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=name(row), marks=[] if row in FEW else [pytest.mark.wide]) for row in ROWS]
)
def test_a_run_broken_and_resumed_is_the_run_unbroken_bit_for_bit(row: Row, run: Run, tmp_path: Path) -> None:
    flags = [*row_flags(row), "--train-iters", STEPS]
    world_size = row["tensor_parallel"] * row["data_parallel"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(*flags, "--save", whole, "--save-interval", BROKEN_AT, world_size=world_size)
    run(*flags, "--save", broken, "--exit-interval", BROKEN_AT, world_size=world_size, expected=85)
    assert latest_iteration(broken) == BROKEN_AT
    run(*flags, "--save", broken, "--resume", "auto", world_size=world_size)
    for iteration in (BROKEN_AT, STEPS):
        assert_same_checkpoint(broken / f"iter_{iteration:07d}", whole / f"iter_{iteration:07d}")
    assert metrics(broken) == metrics(whole)
    assert iterations(broken) == list(range(1, STEPS + 1))


LAYOUTS = {
    "one": (1, 1, "--tp", "1"),
    "tp2": (2, 1, "--tp", "2"),
    "tp2sp": (2, 1, "--tp", "2", "--sequence-parallel"),
    "dp2": (2, 2, "--tp", "1"),
    "dp2zero1": (2, 2, "--tp", "1", "--use-distributed-optimizer"),
    "tp2dp2zero1": (4, 2, "--tp", "2", "--use-distributed-optimizer"),
}
CHANGES = [
    ("tp2", "dp2zero1"),
    *(
        pytest.param(*change, marks=pytest.mark.wide)
        for change in (("tp2dp2zero1", "one"), ("one", "tp2sp"), ("dp2", "tp2dp2zero1"), ("dp2zero1", "dp2"))
    ),
]


@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.wide), "llama"])
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_run_resumed_under_another_layout_is_the_same_run(
    before: str, after: str, family: str, run: Run, tmp_path: Path
) -> None:
    """Dropout is at its default of 0.1."""
    flags = [*FAMILIES[family], "--fp64", "--train-iters", 4]
    whole = tmp_path / "whole"
    run(*flags, "--save", whole)
    directory = tmp_path / f"{before}-{after}"
    for layout, more, code in ((before, ["--exit-interval", 2], 85), (after, ["--resume", "auto"], 0)):
        world_size, _, *layout_flags = LAYOUTS[layout]
        run(*flags, *layout_flags, *more, "--save", directory, world_size=world_size, expected=code)
    assert_close_runs(directory, whole)
    expected = saved_tensors(whole / "iter_0000004")
    for tensor, values in saved_tensors(directory / "iter_0000004").items():
        assert_parameter_close(values, expected[tensor], learning_rate=1e-2, name=tensor)


def assert_close_runs(directory: Path, expected: Path) -> None:
    for line, wanted in zip(metrics(directory), metrics(expected), strict=True):
        assert line["consumed_samples"] == wanted["consumed_samples"]
        for figure in ("lm_loss", "grad_norm"):
            assert math.isclose(line[figure], wanted[figure], rel_tol=1e-10), (line["iteration"], figure)


@pytest.mark.wide
def test_load_continues_into_another_folder_and_prefers_what_was_saved_there(run: Run, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    gpt2 = FAMILIES["gpt2"]
    run(*gpt2, "--train-iters", 4, "--save", first, "--exit-interval", 2, expected=85)
    flags = [*gpt2, "--train-iters", 4, "--save", second, "--load", first, "--resume", "auto"]
    assert "iter_0000002" in run(*flags, "--exit-interval", 3, expected=85).stdout
    assert iterations(second) == [3]
    assert str(second / "iter_0000003") in run(*flags).stdout
    assert iterations(second) == [3, 4]
    assert latest_iteration(first) == 2


def test_load_of_an_empty_folder_starts_anew_and_says_so(run: Run, tmp_path: Path) -> None:
    out = run(*FAMILIES["gpt2"], "--train-iters", 1, "--save", tmp_path / "s", "--load", tmp_path / "s").stdout
    assert "has no checkpoint" in out


def test_validation_in_between_changes_nothing(run: Run, tmp_path: Path) -> None:
    gpt2 = [*FAMILIES["gpt2"], "--train-iters", 4]  # with dropout, which evaluation turns off and training on again
    run(*gpt2, "--save", tmp_path / "without")
    run(*gpt2, "--save", tmp_path / "with", "--eval-iters", 1, "--eval-interval", 1)
    assert_same_checkpoint(tmp_path / "with/iter_0000004", tmp_path / "without/iter_0000004")

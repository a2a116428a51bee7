"""Stages with only the embedding, only the loss or nothing at all train, save and resume like any other stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.runs import COURSE, NO_DROPOUT, SIZES, Run, assert_same_checkpoint, losses, words

FLAGS = (*SIZES, *COURSE, *NO_DROPOUT, *words("--train-iters 4 --save-interval 2 --log-num-zeros-in-grad"))
EMPTY = words("--pp 4 --pipeline-model-parallel-layout E||tt|L")


@pytest.mark.parametrize(
    "dtype", [pytest.param("--fp64", marks=pytest.mark.wide), "--bf16"]
)  # with masters beside the parameters, and without
def test_a_run_goes_on_over_stages_that_hold_nothing(dtype: str, run: Run, tmp_path: Path) -> None:
    """One micro-batch of a step runs backward through a stage directly after its forward."""
    flags = (*FLAGS, dtype, "--micro-batch-size", 4)
    run(*flags, "--save", tmp_path / "alone")
    run(*flags, *EMPTY, "--save", tmp_path / "empty", world_size=4)
    assert losses(tmp_path / "empty") == losses(tmp_path / "alone")
    run(*flags, *EMPTY, "--load", tmp_path / "empty", "--save", tmp_path / "more", "--train-iters", 6, world_size=4)
    run(*flags, "--load", tmp_path / "alone", "--save", tmp_path / "all", "--train-iters", 6)
    assert_same_checkpoint(tmp_path / "more" / "iter_0000006", tmp_path / "all" / "iter_0000006")

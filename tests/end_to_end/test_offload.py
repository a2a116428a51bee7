"""Runs with optimizer state and weights on the host are the runs without, whatever they load and however they end."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.test_conversion import flags as of_huggingface
from tests.end_to_end.runs import (
    GPT2,
    MOCK,
    Run,
    assert_same_checkpoint,
    ended,
    iterations,
    latest_iteration,
    metrics,
    saved_tensors,
    words,
)
from tests.harness import huggingface
from tests.harness.close import assert_bits_equal
from tests.harness.job import Job
from tests.harness.wide import wide_except

FAULTY = Path(__file__).resolve().parents[1] / "harness" / "faulty_copies.py"
OFFLOADED = words("--optimizer-cpu-offload --optimizer-offload-fraction")
ZERO3 = words("--data-parallel-sharding-strategy optim_grads_params --optimizer-cpu-offload --parameter-offload")


def step(directory: Path, number: int) -> Path:
    return directory / f"iter_{number:07d}"


@pytest.mark.wide
@pytest.mark.parametrize("fraction", wide_except(["0.3", "1"], ["0.3"]))
@pytest.mark.parametrize("kept", wide_except(["bf16", "remainders", "fp32"], ["bf16"]))
def test_foreign_weights_take_the_first_step_that_they_take_without_offloading(
    kept: str, fraction: str, run: Run, tmp_path: Path
) -> None:
    huggingface.save(tmp_path / "theirs", "llama")
    more = {"bf16": "--bf16", "remainders": "--bf16 --use-precision-aware-optimizer --store-param-remainders"}
    for name, offloaded in (("plain", ()), ("offloaded", (*OFFLOADED, fraction))):
        flags = of_huggingface(tmp_path / "theirs", tmp_path / name, steps=2)
        run(*flags, *words(more.get(kept, "")), *offloaded, data=())
    assert metrics(tmp_path / "offloaded") == metrics(tmp_path / "plain")
    expected = saved_tensors(step(tmp_path / "plain", 2))
    for tensor, values in saved_tensors(step(tmp_path / "offloaded", 2)).items():
        assert_bits_equal(values, expected[tensor], tensor)


@pytest.mark.wide
@pytest.mark.parametrize("manner", wide_except(["--finetune", "--no-load-optim", ""], ["--no-load-optim"]))
def test_a_resumed_run_may_offload_another_share(manner: str, run: Run, tmp_path: Path) -> None:
    flags = [*GPT2, "--bf16", "--train-iters", 4, "--lr-decay-style", "constant"]
    run(*flags, *OFFLOADED, "1", "--save", tmp_path / "before", "--exit-interval", 2, expected=85)
    for name, offloaded in (("plain", ()), ("offloaded", (*OFFLOADED, "0.4"))):
        run(*flags, *words(manner), *offloaded, "--load", tmp_path / "before", "--save", tmp_path / name)
    assert metrics(tmp_path / "offloaded") == metrics(tmp_path / "plain")
    last = 4 if manner != "--finetune" else latest_iteration(tmp_path / "plain")
    assert_same_checkpoint(step(tmp_path / "offloaded", last), step(tmp_path / "plain", last))


@pytest.mark.parametrize("number", wide_except(range(20, 44, 4), [28]))
def test_a_run_killed_in_the_middle_of_a_copy_resumes_bit_for_bit(
    number: int, run: Run, spawn: Callable[..., Job], tmp_path: Path
) -> None:
    flags = [*GPT2, *ZERO3, "--train-iters", 4, "--save-interval", 1]
    run(*flags, "--save", tmp_path / "whole", world_size=2)
    argv = [FAULTY, *MOCK, *flags, "--save", tmp_path / "broken"]
    job = spawn(argv, 2, COPY=f"kill {number}")
    codes = job.wait(240)
    assert set(codes) != {0}, codes
    run(*flags, "--save", tmp_path / "broken", "--resume", "auto", world_size=2)
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")
    assert_same_checkpoint(step(tmp_path / "broken", 4), step(tmp_path / "whole", 4))
    assert iterations(tmp_path / "broken") == [1, 2, 3, 4]


def test_a_copy_that_fails_ends_the_run_with_its_error(spawn: Callable[..., Job], tmp_path: Path) -> None:
    argv = [FAULTY, *MOCK, *GPT2, *OFFLOADED, "1", "--train-iters", 4, "--save", tmp_path / "run"]
    found = ended(spawn(argv, 1, COPY="error 6"), expected=None)
    assert found.codes != [0]
    assert re.search("the copy failed", found.stderr), found.stderr

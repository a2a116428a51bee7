"""The flags of learning rates and weight decay reach the optimizer, in the complete program."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.end_to_end.runs import FAMILIES, NO_DROPOUT, Run, metrics, saved_tensors, words
from tests.harness.close import assert_bits_equal, assert_parameter_close

TOKEN_TABLES = ("model/embedding.word", "model/output")
UNDECAYED = ("bias", "norm.weight")


def train(run: Run, directory: Path, flags: str, family: str = "llama", world_size: int = 1) -> None:
    course = (*FAMILIES[family], *NO_DROPOUT, "--save", directory, "--save-interval", 1)
    run(*course, *words(flags), world_size=world_size)


def weights(directory: Path, step: int) -> dict[str, torch.Tensor]:
    tensors = saved_tensors(directory / f"iter_{step:07d}")
    return {name: values for name, values in tensors.items() if name.startswith("model/")}


@pytest.mark.wide_except("gpt2---tp 2")
@pytest.mark.parametrize(
    ("family", "layout"), [("gpt2", "--tp 2"), ("llama", "--data-parallel-sharding-strategy optim")]
)
def test_a_decoupled_rate_of_zero_holds_the_token_tables_still(
    family: str, layout: str, run: Run, tmp_path: Path
) -> None:
    train(run, tmp_path, f"--train-iters 3 --decoupled-lr 0 --weight-decay 0.1 {layout}", family, world_size=2)
    assert {line["decoupled_learning_rate"] for line in metrics(tmp_path)} == {0.0}
    first, last = weights(tmp_path, 1), weights(tmp_path, 3)
    assert (TOKEN_TABLES[1] in first) == (family == "llama")
    for name, values in first.items():
        if name in TOKEN_TABLES:
            assert_bits_equal(last[name], values, name)
        else:
            assert not torch.equal(last[name], values), name


def test_weight_decay_is_that_of_the_step(run: Run, tmp_path: Path) -> None:
    """It rises from 0, so that the first of two steps is the plain one, and the second takes lr * 0.4 / 2 besides."""
    train(run, tmp_path / "plain", "--fp64 --train-iters 2 --lr-decay-style constant --weight-decay 0")
    rising = "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.4"
    train(run, tmp_path / "rising", f"--fp64 --train-iters 2 --lr-decay-style constant {rising}")
    assert [line["weight_decay"] for line in metrics(tmp_path / "rising")] == pytest.approx([0.0, 0.2])
    before, plain = weights(tmp_path / "plain", 1), weights(tmp_path / "plain", 2)
    for name, values in weights(tmp_path / "rising", 2).items():
        decay = 0.0 if name.endswith(UNDECAYED) else 1e-2 * 0.2
        assert_parameter_close(values, plain[name] - decay * before[name], learning_rate=1e-2, name=name)
        assert torch.equal(values, plain[name]) == (decay == 0.0), name


@pytest.mark.wide
def test_noam_and_a_scaling_rule_through_a_resume(run: Run, tmp_path: Path) -> None:
    scaling = "--lr-scaling-rule sqrt --lr-scaling-base-batch-size 1"
    course = (*FAMILIES["gpt2"], "--train-iters", 6, "--save", tmp_path, "--lr", 0.2, "--lr-decay-style", "noam")
    flags = (*course, "--lr-warmup-iters", 3, *words(scaling))
    ended = run(*flags, "--exit-interval", 4, expected=85)
    assert "are multiplied by sqrt(4 / 1) = 2: --lr 0.2 counts as 0.4" in ended.stdout
    assert f"the learning rate rises to {0.1 / math.sqrt(3):.6g} within 3 steps" in ended.stdout
    run(*flags, "--resume", "auto")
    expected = [0.4 * 16**-0.5 * min(step**-0.5, step * 3**-1.5) for step in range(1, 7)]
    assert [line["learning_rate"] for line in metrics(tmp_path)] == pytest.approx(expected, rel=1e-12)

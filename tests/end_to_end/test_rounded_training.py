"""Training with rounded operands learns as without, and a run may begin to round, and stop."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from tests.end_to_end import runs
from tests.end_to_end.golden import LLAMA, RECIPES, losses, read, rounded_losses
from tests.end_to_end.runs import MOCK, NO_DROPOUT, Run, metrics, words
from tests.end_to_end.test_golden import RELATIVE, SAME_INITIAL_WEIGHTS
from tests.harness.close import assert_number_close


@functools.cache
def last_losses(way: str | None) -> float:
    """Return the mean loss of the last ten of fifty steps in bf16, by a recipe or none."""
    found = losses(LLAMA, torch.bfloat16) if way is None else rounded_losses(way, torch.bfloat16)
    return sum(found[-10:]) / 10


@pytest.mark.wide
@pytest.mark.parametrize("way", RECIPES)
def test_fifty_steps_learn_as_without_rounding(way: str) -> None:
    plain = last_losses(None)
    assert last_losses(way) != plain
    assert abs(last_losses(way) - plain) < 0.01 * plain


@pytest.mark.wide
@pytest.mark.skipif(not SAME_INITIAL_WEIGHTS, reason="weights that differ in their last bits have other codes")
@pytest.mark.parametrize("way", RECIPES)
def test_fifty_steps_are_as_committed(way: str) -> None:
    for step, (actual, expected) in enumerate(
        zip(rounded_losses(way, torch.float64), read("recipes")[way], strict=True)
    ):
        assert_number_close(actual, expected, f"{way}, step {step}", RELATIVE["float64"])


FLAGS = (*MOCK, *runs.LLAMA, *words("--bf16 --save-interval 2"))
FP8 = words("--fp8-format hybrid --fp8-recipe tensorwise")


@pytest.mark.wide
def test_a_run_begins_to_round_and_stops(run: Run, tmp_path: Path) -> None:
    """Checkpoints hold the same tensors, and what has changed is told."""

    def go_on(steps: int, *flags: str) -> str:
        return run(*FLAGS, "--save", tmp_path, "--resume", "auto", "--train-iters", str(steps), *flags).stdout

    go_on(2)
    begun = go_on(4, *FP8)
    assert "note: --fp8-format is hybrid here, and was unset" in begun
    assert "bfloat16, products in tensorwise" in begun
    rounded = go_on(6, *words("--fp4-format e2m1 --first-last-layers-bf16 --num-layers-at-end-in-bf16 0"))
    assert "note: --fp4-format is e2m1 here, and was unset" in rounded
    assert "note: --fp4-format is unset here, and was e2m1" in go_on(8)
    assert [each["iteration"] for each in metrics(tmp_path)] == list(range(1, 9))


@pytest.mark.bits
def test_a_rounded_run_resumes_with_the_same_bits(run: Run, tmp_path: Path) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    run(*FLAGS, *FP8, "--save", once, *words("--train-iters 4 --lr-decay-iters 4"))
    for steps in ("2", "4"):
        run(*FLAGS, *FP8, "--save", twice, *words(f"--resume auto --train-iters {steps} --lr-decay-iters 4"))
    assert [each["lm_loss"] for each in metrics(twice)] == [each["lm_loss"] for each in metrics(once)]


@pytest.mark.wide
@pytest.mark.bits
def test_gathered_codes_change_no_figure_of_a_run(run: Run, tmp_path: Path) -> None:
    """Nor an evaluation, nor one that goes on from a checkpoint, with the flag and without."""
    sharded = words("--data-parallel-sharding-strategy optim_grads_params --train-iters 4 --eval-interval 1")
    flags, gathered = (*FLAGS, *FP8, *sharded, *words("--eval-iters 1")), "--fp8-param-gather"
    runs_of = {"values": ((), ()), "codes": ((gathered,), (gathered,)), "both": ((gathered,), ())}
    found = {}
    for name, (first, second) in runs_of.items():
        run(*flags, *first, "--save", tmp_path / name, "--exit-interval", 2, world_size=2, expected=85)
        run(*flags, *second, "--save", tmp_path / name, *words("--resume auto"), world_size=2)
        losses = ("lm_loss", "valid_loss", "grad_norm")
        found[name] = [[each.get(loss) for loss in losses] for each in metrics(tmp_path / name)]
    assert found["codes"] == found["both"] == found["values"]
    assert sum(None not in figures[:1] + figures[2:] for figures in found["values"]) == 4
    assert sum(figures[1] is not None for figures in found["values"]) >= 4


LAYOUTS = {
    "tensorwise": ("--fp8-format hybrid --fp8-recipe tensorwise --fp8-wgrad", "--cp 2 --tp 2 --sequence-parallel"),
    "nvfp4": ("--fp4-format e2m1", "--pp 2 --tp 2 --sequence-parallel --pipeline-schedule zb-v"),
}


@pytest.mark.wide
@pytest.mark.parametrize("recipe", LAYOUTS)
def test_a_layout_has_the_losses_of_one_process(recipe: str, run: Run, tmp_path: Path) -> None:
    """Evaluations, too; and the proof of the steps knows the messages of layers."""
    flags, layout = map(words, LAYOUTS[recipe])
    sizes = words(
        "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --train-iters 3 --eval-iters 1 --eval-interval 2"
    )
    experts = words("--num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax --moe-layer-freq [0,1,0,1] --fp64")
    command = (*MOCK, *runs.LLAMA, *sizes, *experts, *NO_DROPOUT, *flags)
    run(*command, "--save", tmp_path / "alone")
    run(*command, *layout, "--save", tmp_path / "split", world_size=4)
    for ours, theirs in zip(metrics(tmp_path / "split"), metrics(tmp_path / "alone"), strict=True):
        for name in theirs.keys() & {"lm_loss", "grad_norm", "valid_loss", "test_loss", "iteration"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-10), name

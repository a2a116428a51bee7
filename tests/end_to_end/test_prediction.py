"""Multi-token prediction from the command line: what its records say, how it resumes, and what leaves it out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.runs import LLAMA, MOCK, Run, losses, metrics, words
from tests.harness.tool import run_tool

FLAGS = [*MOCK, *LLAMA, *words("--save-interval 2")]
DEPTHS = words("--mtp-num-layers 2")


@pytest.mark.wide  # tests/distributed/test_layouts_prediction.py trains and resumes such networks
def test_it_learns_and_resumes_with_the_same_bits(run: Run, tmp_path: Path) -> None:
    """In bf16, on a stage of its own."""
    flags = [*FLAGS, *DEPTHS, *words("--bf16 --pp 2 --mtp-standalone --mtp-use-repeated-layer --eval-iters 1")]
    out = run(*flags, *words("--train-iters 8 --eval-interval 8"), "--save", tmp_path / "whole", world_size=2).stdout
    assert "2 depths predict further tokens with one set of weights" in out
    records = metrics(tmp_path / "whole")
    for name in ("mtp_1_loss", "mtp_2_loss"):
        steps = [record[name] for record in records if name in record]
        assert len(steps) == 8
        assert steps[-1] < steps[0]
    assert {"valid_mtp_1_loss", "valid_mtp_2_loss"} < records[-1].keys() | records[-2].keys()
    stopping = words("--train-iters 8 --eval-interval 8 --exit-interval 4")
    run(*flags, *stopping, "--save", tmp_path / "parts", world_size=2, expected=85)
    again = words("--train-iters 8 --eval-interval 8 --resume auto")
    run(*flags, *again, "--save", tmp_path / "parts", world_size=2)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.wide
def test_depths_are_left_out_and_begun_anew_where_it_is_asked(run: Run, tmp_path: Path) -> None:
    once = words("--train-iters 2")
    run(*FLAGS, *DEPTHS, *once, "--save", tmp_path / "two")
    other = run(
        *FLAGS, *words("--train-iters 4"), "--load", tmp_path / "two", "--save", tmp_path / "none", expected=93
    ).stderr
    assert "(--finetune leaves out the depths of the checkpoint, and begins those of the run anew)" in other
    finetune = [*once, "--finetune", "--load", tmp_path / "two"]
    out = run(*FLAGS, *finetune, "--save", tmp_path / "none").stdout
    assert "has other depths of multi-token prediction: --finetune leaves out its depths (2)\n" in out
    out = run(*FLAGS, *finetune, "--mtp-num-layers", 1, "--save", tmp_path / "one").stdout
    assert "--finetune leaves out its depths (2) and begins those of this run anew (1)\n" in out
    more = [
        *FLAGS,
        *words("--train-iters 4 --mtp-num-layers 2"),
        "--load",
        tmp_path / "two",
        "--save",
        tmp_path / "more",
    ]
    assert "restored: weights, optimizer state (2 updates)" in run(*more).stdout


@pytest.mark.wide
def test_generation_and_folders_know_no_depths(run: Run, tmp_path: Path) -> None:
    run(*FLAGS, *DEPTHS, *words("--train-iters 2"), "--save", tmp_path / "run")
    generated = run_tool("generate", "--load", tmp_path / "run", "--prompt", "1 2", "--max-new-tokens", "3")
    assert generated.code == 0, generated
    folders = ["--load-dir", tmp_path / "run", "--save-dir", tmp_path / "hf"]
    out = run_tool("convert", "--loader", "megalite", "--saver", "hf", *folders, "--verify")
    assert "verified: logits differ by 0.0e+00 at most" in out.stdout

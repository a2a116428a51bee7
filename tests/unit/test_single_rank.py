"""One rank without the others: the flags that ask for it, and the program that runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megalite.commands import pretrain
from megalite.config.single_rank import SingleRank, take_single_rank
from megalite.errors import ConfigurationError
from megalite.extras.planner.commands import calibrate

_FLAGS = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--vocab-size 100 --tokenizer-type NullTokenizer --mock-data --micro-batch-size 1 --global-batch-size 8 --lr 1e-3
--train-iters 2 --tp 2 --pp 2 --hidden-dropout 0 --attention-dropout 0"""
RUN = _FLAGS.split()


@pytest.mark.parametrize(
    ("flags", "alone"),
    [
        ("--dry-run", SingleRank(0, 4, computes=False)),
        (
            "--dry-run --world-size 16 --rank 3 --dry-run-json all.json",
            SingleRank(3, 16, computes=False, json="all.json"),
        ),
        ("--as-rank 5 --of 8", SingleRank(5, 8, computes=True)),
    ],
)
def test_flags_of_one_rank_are_taken_from_those_of_the_run(flags: str, alone: SingleRank) -> None:
    assert take_single_rank([*RUN[:4], *flags.split(), *RUN[4:]], 4) == (alone, RUN)
    assert take_single_rank(RUN, 4) == (None, RUN)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--world-size 8", "--world-size is for --dry-run, which is not given"),
        ("--dry-run 3", "--dry-run takes no value, got '3'"),
        ("--dry-run --rank", "--rank needs one value, got none"),
        ("--dry-run --rank 8 --world-size 8", "--rank 8: with --world-size 8, ranks are 0 to 7"),
        ("--dry-run --world-size many", "--world-size 'many': expected a whole number"),
        ("--as-rank 3", "--as-rank R and --of N belong together"),
        ("--as-rank 3 --of 8 --dry-run", "--as-rank R and --of N belong together"),
        ("--as-rank 8 --of 8", "--as-rank 8: with --of 8, ranks are 0 to 7"),
        ("--as-rank -1 --of 8", "--as-rank -1: must be at least 0"),
        ("--dry-run --world-size 0", "--world-size 0: must be at least 1"),
        ("--dry-run --dry-run-json", "--dry-run-json needs one value, got none"),
        (f"--dry-run --dry-run-json {__file__}/all.json", "test_single_rank.py is no folder: choose another path"),
    ],
)
def test_wrong_flags_are_named(flags: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        take_single_rank(flags.split(), 1)
    assert words in str(error.value)


def test_a_dry_run_prints_and_writes_what_a_rank_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all.json"
    flags = f"--dry-run --world-size 8 --rank 5 --dry-run-json {path}"
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *RUN, *flags.split()])
    assert pretrain.main() == 0
    shown = capsys.readouterr().out
    assert "rank 5 of 8 (pp 1, dp 0, cp 0, tp 1): TP 2 x PP 2 x DP 2" in shown
    assert "s in the optimizer, before it " in shown
    found = json.loads(path.read_text())
    assert 0 < found["optimizer_seconds"] < found["seconds"]
    assert {each["name"] for each in found["held"]} >= {"layers.1.attention.query"}
    sent = found["work"]["send B"]["messages"]
    assert [(each["kind"], each["ranks"], each["bytes"], each["times"]) for each in sent] == [
        ("send", [5, 1], 32 * 64 * 4, 4)
    ]


@pytest.mark.wide
def test_a_rank_alone_runs_its_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *RUN, "--as-rank", "5", "--of", "8"])
    assert pretrain.main() == 0
    shown = capsys.readouterr().out
    assert "layout   TP 2 x PP 2 x DP 2" in shown
    assert "without communication" in shown
    assert "model TFLOP/s, half of the causal scores counted" in shown


def test_a_calibration_is_of_the_device_that_is_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    flags = ["calibrate.py", "--output", str(tmp_path / "mine.toml"), "--cluster", "H100-SXM"]
    monkeypatch.setattr(sys, "argv", flags)
    with pytest.raises(ConfigurationError, match="--cluster H100-SXM: this machine has no GPU"):
        calibrate.main()
    monkeypatch.setattr(sys, "argv", [*flags[:3], "--doctor", str(tmp_path / "none.json")])
    with pytest.raises(ConfigurationError, match="cannot be read as JSON"):
        calibrate.main()
    assert not (tmp_path / "mine.toml").exists()

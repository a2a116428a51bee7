"""QK-Clip from the command line: what is recorded and shown, and a resume to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.runs import LLAMA, MOCK, Run, losses, metrics, words

FLAGS = [*MOCK, *LLAMA, *words("--save-interval 2 --lr 0.05 --init-method-std 0.3 --eval-interval 2 --eval-iters 1")]
CLIP = words("--qk-clip --qk-clip-threshold 3 --optimizer muon --bf16 --use-distributed-optimizer")


def figures(folder: Path) -> list[object]:
    return [record["max_attention_logit"] for record in metrics(folder) if "grad_norm" in record]


def test_it_is_recorded_and_resumes_with_the_same_bits(run: Run, tmp_path: Path) -> None:
    out = run(*FLAGS, *CLIP, *words("--train-iters 6"), "--save", tmp_path / "whole", world_size=2).stdout
    logits = figures(tmp_path / "whole")
    assert len(logits) == 6
    assert f" | max attention logit {logits[0]:.3f} | " in out
    stopping = words("--train-iters 6 --exit-interval 2")
    run(*FLAGS, *CLIP, *stopping, "--save", tmp_path / "parts", world_size=2, expected=85)
    run(*FLAGS, *CLIP, *words("--train-iters 6 --resume auto"), "--save", tmp_path / "parts", world_size=2)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert figures(tmp_path / "parts") == logits


@pytest.mark.wide
def test_the_figure_is_that_of_any_layout_and_recording_it_changes_nothing(run: Run, tmp_path: Path) -> None:
    flags = [*FLAGS, *words("--fp64 --train-iters 3 --global-batch-size 4")]
    layouts = {"alone": "", "tp2": "--tp 2 --sequence-parallel", "pp2": "--pp 2", "cp2": "--cp 2", "dp2": ""}
    for name, layout in layouts.items():
        ranks = 1 if name == "alone" else 2
        run(*flags, "--log-max-attention-logit", *words(layout), "--save", tmp_path / name, world_size=ranks)
        assert figures(tmp_path / name) == pytest.approx(figures(tmp_path / "alone"), rel=1e-10)
    run(*flags, "--save", tmp_path / "plain")
    assert losses(tmp_path / "plain") == losses(tmp_path / "alone")
    run(*flags, *words("--qk-clip --qk-clip-threshold 1"), "--save", tmp_path / "clipped")
    first, *others = zip(figures(tmp_path / "clipped"), figures(tmp_path / "alone"), strict=True)
    assert first[0] == first[1]
    assert all(clipped < free for clipped, free in others)

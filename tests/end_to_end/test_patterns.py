"""Patterns of layers from the command line: what a checkpoint says of them, and what flags say otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.runs import GPT2, MOCK, Run, losses, words


@pytest.mark.wide
def test_a_network_is_taken_from_a_checkpoint_without_its_stages(run: Run, tmp_path: Path) -> None:
    flags = [*MOCK, *words("--train-iters 2 --save-interval 2")]
    pattern = [*GPT2[: GPT2.index("--num-layers")], *GPT2[GPT2.index("--num-layers") + 2 :]]
    run(*flags, *pattern, "--hybrid-layer-pattern", "*-|*-", "--pp", 2, "--save", tmp_path / "a", world_size=2)
    more = [
        *MOCK,
        *words(
            "--train-iters 4 --use-checkpoint-args --lr 1e-3 --seq-length 16 --micro-batch-size 2 --global-batch-size 4"
        ),
        "--load",
        tmp_path / "a",
    ]
    as_it_was = run(*more, "--save", tmp_path / "b").stdout
    assert "4 layers *-*-" in as_it_was
    assert "2 layers, hidden" in run(*more, "--num-layers", 2, "--save", tmp_path / "c").stdout
    assert losses(tmp_path / "b") == losses(tmp_path / "c")

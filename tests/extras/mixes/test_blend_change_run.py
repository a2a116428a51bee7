"""A run with validation sets that resumes: with its blend nothing is told, with a changed one what it repeats."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from tests.end_to_end.runs import GPT2, NO_DROPOUT, Run, metrics, words
from tests.harness.token_files import add_document

FLAGS = (*GPT2, *NO_DROPOUT, *words("--train-iters 8 --eval-interval 4 --resume auto"))
SETS = words("--multiple-validation-sets --full-validation --log-validation-ppl-to-tensorboard")


def test_a_changed_blend_says_what_it_repeats(run: Run, tmp_path: Path) -> None:
    """The run stops after 6 steps of 4 samples; evaluations need no --eval-iters, which these flags set to 0."""
    for seed, name in enumerate(("code", "web")):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for _ in range(60):
                add_document(writer, np.random.default_rng(seed).integers(0, 60, 17))
            writer.finish()
    code, web = tmp_path / "code", tmp_path / "web"

    def trains(save: Path, *weights: int, flags: tuple[str, ...] = (), expected: int = 0) -> str:
        data = ("--data-path", weights[0], code, weights[1], web, "--split", "80,20,0")
        null = words("--tokenizer-type NullTokenizer --vocab-size 60")
        said: str = run(*FLAGS, *SETS, *flags, "--save", save, data=(*null, *data), expected=expected).stdout
        return said

    said = trains(tmp_path / "run", 1, 1, flags=("--exit-interval", "6"), expected=85)
    assert "validation of code at step 4 | loss " in said
    assert "validation of web at step 4 | loss " in said
    shutil.copytree(tmp_path / "run", tmp_path / "changed")
    assert "note:" not in trains(tmp_path / "run", 1, 1)
    said = trains(tmp_path / "changed", 1, 3)
    assert "code: samples 6 to 7 of its order come again (2 samples, 32 tokens)" in said
    assert "web: samples 12 to 17 of its order are passed over (6 samples, 96 tokens)" in said
    assert "give --data-mix-schedule FILE, which continues each source where it is" in said
    valid = [line for line in metrics(tmp_path / "run") if "valid_loss" in line]
    assert [line["iteration"] for line in valid] == [4, 8]
    for line in valid:
        assert {
            f"valid_{figure}/{name}" for figure in ("loss", "perplexity") for name in ("code", "web")
        } <= line.keys()

"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import BYTES, LLAMA, MOCK, NO_DROPOUT, PRETRAIN, ROOT, Ended, Run, Start, ended
from tests.harness.job import Job


@pytest.fixture
def start(spawn: Callable[..., Job]) -> Start:
    """Start training on mock data: `start("--flag", value, world_size=2, VARIABLE="of the environment")`."""

    def start_training(*flags: Any, world_size: int = 1, data: tuple[Any, ...] = MOCK, **environment: str) -> Job:
        return spawn([PRETRAIN, *data, *flags], world_size, **environment)

    return start_training


@pytest.fixture
def run(start: Start) -> Run:
    """Train to the end; see `runs.Run`."""

    def run_training(*flags: Any, world_size: int = 1, expected: int | None = 0, **more: Any) -> Ended:
        return ended(start(*flags, world_size=world_size, **more), expected)

    return run_training


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with corpus.jsonl, tokenizer.model and corpus_text_document.{bin,idx}, made by the commands."""
    folder = tmp_path_factory.mktemp("corpus")
    sources = sorted((ROOT / "megalite").rglob("*.py"))[:20]
    lines = [json.dumps({"text": f"{path.read_text()}\n# naïve café ☕ {path.name}"}) + "\n" for path in sources]
    (folder / "corpus.jsonl").write_text("".join(lines))
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", folder / "tokenizer.model"]
    text = ["--input", folder / "corpus.jsonl"]
    commands = [
        ["train_tokenizer.py", *text, "--vocab-size", 500, "--output-prefix", folder / "tokenizer"],
        ["preprocess_data.py", *text, *tokenizer, "--output-prefix", folder / "corpus", "--append-eod"],
    ]
    for number, (name, *flags) in enumerate(commands):
        with Job([ROOT / "tools" / str(name), *flags], 1, folder / f"job{number}") as job:
            assert job.wait() == [0], job.stderr(0)
    return folder


@pytest.fixture(scope="session")
def byte_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory of a Llama on bytes, in float64, whose probabilities are far from 0 and 1."""
    folder = tmp_path_factory.mktemp("byte_llama")
    flags = [*LLAMA, *NO_DROPOUT, "--fp64", "--init-method-std", 0.4, "--train-iters", 1, "--save", folder / "run"]
    with Job([PRETRAIN, *BYTES, *flags], 1, folder / "job") as job:
        ended(job)
    return folder / "run"

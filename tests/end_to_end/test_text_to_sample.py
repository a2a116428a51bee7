"""Path from text to a sample: corpus, tokenizer, token files, training, generation, validation loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megalite.config import DataConfig
from megalite.data.datasets import Samples, build_token_datasets
from tests.end_to_end.runs import (
    GENERATE,
    LLAMA,
    NO_DROPOUT,
    ROOT,
    Ended,
    Run,
    assert_same_checkpoint,
    ended,
    latest_iteration,
    losses,
    metrics,
    saved_tensors,
    words,
)
from tests.harness.close import assert_number_close
from tests.harness.job import Job
from tests.harness.tokenizers import named_tokenizer
from tests.oracle import Oracle, loss_sum_and_count

Spawn = Callable[..., Job]
TOOLS = ROOT / "tools"
PROMPT = "def main(argument"


@pytest.fixture
def data(corpus: Path) -> list[str]:
    """Return the flags to train on the corpus."""
    tokenizer = words("--tokenizer-type SentencePieceTokenizer --tokenizer-model")
    prefix = str(corpus / "corpus_text_document")
    return ["--data-path", prefix, "--split", "90,10,0", *tokenizer, str(corpus / "tokenizer.model")]


@pytest.fixture
def generate(spawn: Spawn) -> Callable[..., str]:
    """Return the output of `tools/generate.py`."""

    def run(load: Path, *flags: object, world_size: int = 1, prompt: str = PROMPT) -> str:
        command = [GENERATE, "--load", load, "--prompt", prompt, "--max-new-tokens", 12, *flags]
        result: Ended = ended(spawn(command, world_size))
        return result.stdout

    return run


FLAGS = [*LLAMA, *NO_DROPOUT, "--fp64", "--seed", 5]


@pytest.fixture(scope="module")
def trained(corpus: Path) -> Path:
    """Return a run directory of a Llama trained for some steps under TP 2 with sequence parallelism."""
    tokenizer = words("--tokenizer-type SentencePieceTokenizer --tokenizer-model")
    data = [
        "--data-path",
        corpus / "corpus_text_document",
        "--split",
        "90,10,0",
        *tokenizer,
        corpus / "tokenizer.model",
    ]
    layout = words("--tp 2 --sequence-parallel --use-distributed-optimizer --train-iters 30 --global-batch-size 8")
    command = [ROOT / "pretrain_gpt.py", *data, *FLAGS, *layout, "--save", corpus / "run"]
    with Job(command, 2, corpus / "job-train") as job:
        assert job.wait() == [0, 0], job.stderr(0)
    return corpus / "run"


def test_the_loss_falls_from_the_uniform_one(trained: Path) -> None:
    course = losses(trained)
    assert abs(course[0] - math.log(500)) < 0.5
    assert course[-1] < course[0] - 0.8  # the corpus is of this project's files, and changes with them


@pytest.mark.wide
def test_greedy_text_is_the_same_under_every_layout_and_is_text(trained: Path, generate: Callable[..., str]) -> None:
    text = generate(trained, "--temperature", 0)
    assert text.startswith(PROMPT)
    assert len(text) > len(PROMPT) + 1
    assert generate(trained, "--temperature", 0, world_size=2) == text
    assert generate(trained / "iter_0000030", "--top-k", 1, "--seed", 7) == text
    assert generate(trained, "--top-p", 1e-9) == text


@pytest.mark.wide
def test_sampled_text_depends_on_the_seed_alone(trained: Path, generate: Callable[..., str]) -> None:
    first = generate(trained, "--seed", 1)
    assert generate(trained, "--seed", 1, world_size=2) == first
    assert generate(trained, "--seed", 2) != first


def test_the_prompt_comes_back_whole(trained: Path, generate: Callable[..., str]) -> None:
    for prompt in ("naïve café ☕", "  two  spaces", "tab\tand\nline", "¡日本語 🎉!"):
        assert generate(trained, "--max-new-tokens", 0, prompt=prompt) == prompt + "\n"


def test_the_end_of_a_document_ends_the_text(trained: Path, spawn: Spawn, tmp_path: Path, run: Run) -> None:
    # Mock data of one ordinary token: after it comes itself, or the end of the document.
    flags = [*LLAMA, *NO_DROPOUT, "--train-iters", 20, "--lr", "0.05", "--seq-length", 4, "--save", tmp_path / "run"]
    run(*flags, data=words("--mock-data --tokenizer-type NullTokenizer --vocab-size 1"))
    command = [GENERATE, "--load", tmp_path / "run", "--prompt", "0", "--max-new-tokens", 200]
    text = ended(spawn(command, 1)).stdout
    assert set(text.split()) == {"0"}
    assert len(text.split()) < 100


def test_the_tokenizer_may_have_moved(trained: Path, corpus: Path, spawn: Spawn, generate: Callable[..., str]) -> None:
    text = generate(trained, "--temperature", 0)
    moved = (corpus / "tokenizer.model").rename(corpus / "moved.model")
    try:
        job = spawn([GENERATE, "--load", trained, "--prompt", PROMPT], 1)
        assert job.wait() == [64]
        assert "tokenizer.model cannot be read" in job.stderr(0)
        assert generate(trained, "--temperature", 0, "--tokenizer-model", moved) == text
    finally:
        moved.rename(corpus / "tokenizer.model")


# ---------------------------------------------------------------------------------------------------- validation


@pytest.mark.wide
def test_the_validation_loss_is_the_oracles_mean_over_the_same_samples(
    trained: Path, corpus: Path, data: list[str], run: Run, tmp_path: Path
) -> None:
    weights = {
        name.removeprefix("model/"): values
        for name, values in saved_tensors(trained / "iter_0000030").items()
        if name.startswith("model/")
    }
    tokenizer = named_tokenizer("SentencePieceTokenizer", str(corpus / "tokenizer.model"))
    steps, batches, batch_size = 2, 3, 8
    valid = build_token_datasets(
        DataConfig(
            seq_length=16,
            data_path=(str(corpus / "corpus_text_document"),),
            split="90,10,0",
            data_cache_path=str(tmp_path / "cache"),
        ),
        Samples(train=32 * batch_size, valid=(32 // steps + 1) * batches * batch_size, test=0),
        5,
        tokenizer,
    ).valid
    assert valid is not None
    rows = torch.stack([torch.from_numpy(valid[sample]) for sample in range(batches * batch_size)])
    mask = rows[:, :-1] != tokenizer.eod
    positions = torch.arange(16).expand(len(rows), -1)
    oracle = Oracle(normalization="RMSNorm", activation="swiglu", position_embedding_type="rope")
    logits = oracle.logits(weights, rows[:, :-1], positions)[..., :500]
    loss_sum, count = loss_sum_and_count(logits, rows[:, 1:], mask)
    expected = (loss_sum / count).item()

    # A learning rate of 0, so that the step before the validation leaves the weights as they are.
    course = ["--train-iters", 32, "--global-batch-size", batch_size, "--exit-interval", 32, "--eod-mask-loss"]
    course += ["--lr", 0, "--eval-iters", batches, "--eval-interval", steps, "--load", str(trained)]
    layouts = {"dp2": (2, ""), "tp2sp": (2, "--tp 2 --sequence-parallel")}
    for name, (world_size, layout) in layouts.items():
        run(*FLAGS, *course, *words(layout), "--save", tmp_path / name, data=data, world_size=world_size)
        found = [line["valid_loss"] for line in metrics(tmp_path / name) if "valid_loss" in line]
        assert len(found) == 1
        assert_number_close(found[0], expected, name)


# ---------------------------------------------------------------------------------------------------- the config


@pytest.mark.wide
def test_the_saved_configuration_runs_again_to_the_same_bits(data: list[str], run: Run, tmp_path: Path) -> None:
    flags = [*LLAMA, "--tp", 2, "--train-iters", 3, "--eval-iters", 1, "--eval-interval", 2, "--weight-decay", 0.1]
    run(*flags, "--lr-warmup-fraction", 0.5, "--save", tmp_path / "one", data=data, world_size=2)
    config = tmp_path / "one" / "config.yaml"
    run("--config", config, "--save", tmp_path / "two", data=(), world_size=2)
    assert_same_checkpoint(tmp_path / "two" / "iter_0000003", tmp_path / "one" / "iter_0000003")
    assert metrics(tmp_path / "two") == metrics(tmp_path / "one")
    old, new = config.read_text(), (tmp_path / "two" / "config.yaml").read_text()
    assert new == old.replace(str(tmp_path / "one"), str(tmp_path / "two"))
    run("--config", config, "--save", tmp_path / "three", "--train-iters", 1, data=(), world_size=2)
    assert latest_iteration(tmp_path / "three") == 1

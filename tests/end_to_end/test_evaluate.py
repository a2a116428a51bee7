"""`tools/evaluate.py` finds the oracle's loss, whatever the windows, the batches and the layout."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.layout_expected import one_thread
from tests.end_to_end.bytes_by_oracle import LLAMA, log_probabilities, write_byte_tokenizer
from tests.end_to_end.runs import BYTES, EVALUATE, GPT2, Run, ended, saved_weights, words
from tests.harness.close import assert_number_close
from tests.harness.job import Job
from tests.harness.tool import run_tool
from tests.harness.wide import wide_except
from tests.oracle import Oracle

DOCUMENTS = ("naïve café ☕, of several windows", "short", "", "some twenty characters", "x")
TRAINED = 16  # the run's --seq-length


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return documents as JSON lines, and as token files with and without the end of each document."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    (folder / "notes.md").write_text("# Notes\n")
    tokens = ["--input", folder / "text.jsonl", "--tokenizer-type", "ByteTokenizer", "--workers", 1]
    assert run_tool("preprocess", *tokens, "--output-prefix", folder / "bare").code == 0
    assert run_tool("preprocess", *tokens, "--output-prefix", folder / "ended", "--append-eod").code == 0
    return folder


@pytest.fixture(autouse=True)
def small_tensors() -> Iterator[None]:
    with one_thread():
        yield


def assert_oracles(
    figures: dict[str, Any], oracle: Oracle, run: Path, length: int, stride: int, documents: Sequence[str] = DOCUMENTS
) -> None:
    weights = saved_weights(run / "iter_0000001")
    expected = [score for text in documents for score in log_probabilities(oracle, weights, text, length, stride)]
    assert figures["tokens"] == len(expected) == len("".join(documents).encode())
    assert figures["documents"] == len(list(filter(None, documents)))
    loss = -sum(expected) / len(expected)
    assert_number_close(figures["loss"], loss)
    assert_number_close(figures["perplexity"], math.exp(loss))
    assert figures["text_bytes"] == len(expected)
    assert_number_close(figures["bits_per_byte"], loss / math.log(2))


def alone(run: Path, output: Path, *flags: object) -> list[dict[str, Any]]:
    """Return the figures, computed by a new process."""
    result = run_tool("evaluate", "--load", run, "--output", output, *flags)
    assert result.code == 0, result.stderr
    assert result.stderr == ""
    found: list[dict[str, Any]] = json.loads(output.read_text())["data"]
    return found


@pytest.mark.wide_except("7-1")
@pytest.mark.parametrize(("length", "stride"), [(None, None), (16, 5), (7, 1), (64, 64)])
def test_the_figures_are_the_oracles_whatever_the_windows(
    length: int | None, stride: int | None, byte_llama: Path, texts: Path, tmp_path: Path
) -> None:
    flags = [] if length is None else ["--seq-length", length, "--stride", stride]
    (figures,) = alone(byte_llama, tmp_path / "out.json", "--text", texts / "text.jsonl", *flags)
    assert_oracles(figures, LLAMA, byte_llama, length or TRAINED, stride or length or TRAINED)


def test_token_files_give_what_their_text_gives(byte_llama: Path, texts: Path, tmp_path: Path) -> None:
    prefixes = [str(texts / f"{name}_text_document") for name in ("bare", "ended")]
    found = alone(byte_llama, tmp_path / "a.json", "--data-path", *prefixes, "--text", texts / "text.jsonl")
    bare, ended_, text, every = found
    assert bare["loss"] == ended_["loss"] == text["loss"]
    for each in (bare, ended_, text):
        assert_oracles(each, LLAMA, byte_llama, TRAINED, TRAINED)
    assert every["tokens"] == every["text_bytes"] == 3 * text["tokens"]
    assert_number_close(every["loss"], text["loss"])
    weighted = ["--data-path", "1", prefixes[0], "3", prefixes[1], "--limit", 2]
    first, second, blend = alone(byte_llama, tmp_path / "b.json", *weighted)
    assert first["documents"] == 2
    assert first["text_bytes"] == first["tokens"] == len("".join(DOCUMENTS[:2]).encode())
    assert (blend["name"], blend["bits_per_byte"]) == ("blend", None)
    assert_number_close(blend["loss"], (first["loss"] + 3 * second["loss"]) / 4)


def test_a_text_file_is_a_document(byte_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text(DOCUMENTS[0])
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(DOCUMENTS[0].encode()))
    files = [tmp_path / "plain.txt", tmp_path / "packed.txt.gz"]
    for figures in alone(byte_llama, tmp_path / "out.json", "--text", *files)[:2]:
        assert_oracles(figures, LLAMA, byte_llama, TRAINED, TRAINED, DOCUMENTS[:1])


def test_a_hugging_face_folder_has_the_figures_of_what_it_was_made_from(
    byte_llama: Path, texts: Path, tmp_path: Path
) -> None:
    write_byte_tokenizer(tmp_path / "tokenizer")
    flags = ["--loader", "megalite", "--saver", "hf", "--load-dir", byte_llama, "--save-dir", tmp_path / "exported"]
    result = run_tool("convert", *flags, "--tokenizer-model", tmp_path / "tokenizer")
    assert result.code == 0, result.stderr
    text = ["--text", texts / "text.jsonl", "--seq-length", TRAINED]
    (figures,) = alone(tmp_path / "exported", tmp_path / "out.json", *text)
    assert_oracles(figures, LLAMA, byte_llama, TRAINED, TRAINED)


@pytest.mark.wide
def test_batches_change_nothing(byte_llama: Path, texts: Path, tmp_path: Path) -> None:
    def loss(size: int) -> float:
        flags = ["--text", texts / "text.jsonl", "--stride", 3, "--micro-batch-size", size]
        return float(alone(byte_llama, tmp_path / f"{size}.json", *flags)[0]["loss"])

    for size in (2, 5, 100):
        assert_number_close(loss(size), loss(1), f"{size} windows at a time")


LAYOUTS = {
    "dp2": (2, ""),
    "tp2": (2, "--tp 2"),
    "pp2": (2, "--pp 2"),
    "tp2-pp2": (4, "--tp 2 --pp 2"),
    "cp2": (2, "--cp 2"),
}


@pytest.mark.parametrize("layout", wide_except(["dp2", "tp2", "pp2", "tp2-pp2", "cp2"], ["tp2-pp2"]))
def test_every_layout_finds_the_same(
    layout: str, byte_llama: Path, texts: Path, tmp_path: Path, spawn: Callable[..., Job]
) -> None:
    command = [EVALUATE, "--load", byte_llama, "--text", texts / "text.jsonl", "--stride", 5]
    world_size, flags = LAYOUTS[layout]
    command += ["--micro-batch-size", 2, "--output", tmp_path / "out.json", *words(flags)]
    shown = ended(spawn(command, world_size)).stdout
    results = json.loads((tmp_path / "out.json").read_text())
    assert_oracles(results["data"][0], LLAMA, byte_llama, TRAINED, 5)
    heading, line = shown.splitlines()
    assert heading.split() == ["data", "documents", "tokens", "loss", "perplexity", "bits", "per", "byte"]
    assert line.split()[:4] == [str(texts / "text.jsonl"), "4", "64", f"{results['data'][0]['loss']:.5f}"]


@pytest.mark.wide
def test_learned_positions(run: Run, texts: Path, tmp_path: Path) -> None:
    run(*GPT2, "--fp64", "--train-iters", 1, "--save", tmp_path / "run", data=BYTES)
    (figures,) = alone(tmp_path / "run", tmp_path / "o", "--text", texts / "text.jsonl", "--seq-length", 32)
    assert_oracles(figures, Oracle(), tmp_path / "run", 32, 32)
    refused(
        "--load", tmp_path / "run", "--text", texts / "text.jsonl", "--seq-length", 33, message="at most 32, the pos"
    )


def refused(*flags: object, message: str) -> None:
    result = run_tool("evaluate", *flags)
    assert result.code in (64, 93), result.stderr
    assert message in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--text missing.jsonl", "missing.jsonl cannot be read (No such file or directory)"),
        ("--data-path missing", "missing.idx does not exist"),
        ("--text {texts}/text.jsonl --stride 17", "--stride 17: must be from 1 to --seq-length 16"),
        ("--text {texts}/text.jsonl --stride 0", "--stride 0: must be from 1 to --seq-length 16"),
        ("--text {texts}/text.jsonl --seq-length 0", "--seq-length 0: must be at least 1"),
        (
            "--text {texts}/notes.md",
            "notes.md:1: not a JSON object (Expecting value, column 1); files not named .txt (or .txt.gz, .txt.zst) or "
            ".parquet are read as JSON lines. Rename it to .txt if it is one text, else to .jsonl",
        ),
        ("--text {texts}/text.jsonl --json-keys title", "text.jsonl:1: no field 'title' (--json-keys)"),
        ("--text {texts}/text.jsonl --data-path 1 {texts}/bare_text_document", "--text has no weight in the blend"),
        ("--text {texts}/text.jsonl --tp 3", "--tensor-model-parallel-size 3 does not divide the attention heads, 4"),
        ("--text {texts}/text.jsonl --pp 2", "1 ranks cannot be divided"),
        ("--text {texts}/text.jsonl --pp 3", "3 stages are more than the model's 2 layers"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(flags: str, message: str, byte_llama: Path, texts: Path) -> None:
    refused("--load", byte_llama, *flags.format(texts=texts).split(), message=message)


def test_a_text_without_tokens_is_refused(byte_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    refused("--load", byte_llama, "--text", tmp_path / "empty.txt", message="empty.txt has no tokens")
    refused("--load", tmp_path, "--text", tmp_path / "empty.txt", message="has no checkpoint")

"""Needles: where they stand in a sample, what is scored, and what a model that can find them gets."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.data.tokenizers.huggingface import load_tokenizer_json
from megalite.data.tokenizers.null import NullTokenizer
from megalite.errors import ConfigurationError
from megalite.inference import needle
from megalite.inference.generation import generate
from megalite.inference.loading import load_network, open_model
from megalite.inference.needle import Haystack, generated_haystack, needle_window, read_haystack
from megalite.inference.sampling import Sampling
from megalite.inference.scoring import Score, Window, score_windows
from megalite.parallel.mesh import ParallelMesh
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from tests.distributed.layout_expected import one_thread
from tests.harness.finding_model import write_finding_model
from tests.harness.template_tokenizer import write_template_tokenizer
from tests.harness.token_files import add_document
from tests.harness.tool import Ended, run_tool

BYTES = ByteTokenizer()
SAMPLE = re.compile(
    r"(?P<before>.*?)(?P<needle> The number of the (?P<name>\w+ \w+) is (?P<number>\d{7})\.)(?P<behind>.*)"
    r"\nQuestion: what number does the text give to the (?P<asked>[\w ]+)\?\n"
    r"Answer: the number of the (?P<again>[\w ]+) is (?P<answer>\d{7})",
    re.DOTALL,
)


def sample(length: int, depth: float, seed: int = 0, haystack: Haystack | None = None) -> re.Match[str]:
    """Return the parts of a sample in bytes, and check what every sample is."""
    haystack = haystack or generated_haystack(length, seed, BYTES)
    window = needle_window(BYTES, haystack, length, depth, random.Random(seed))
    assert len(window.tokens) == length + 1
    assert window.tokens[0] == BYTES.eod
    assert window.counted == len(" 1234567")
    found = SAMPLE.fullmatch(BYTES.decode(window.tokens[1:].tolist()))
    assert found is not None
    assert found["name"] == found["asked"] == found["again"]
    assert found["number"] == found["answer"]
    return found


@given(st.integers(250, 3000), st.floats(0, 1), st.integers(0, 100))
def test_the_needle_stands_once_at_its_depth_between_two_sentences(length: int, depth: float, seed: int) -> None:
    found = sample(length, depth, seed)
    before, filler = len(found["before"]), len(found["before"]) + len(found["behind"])
    assert depth * filler - 80 < before <= round(depth * filler)
    assert before == 0 or found["before"].endswith(".") or depth * filler < 80
    assert found["needle"] not in found["behind"]


def test_samples_are_a_function_of_the_seed() -> None:
    first = sample(400, 0.5, seed=3)
    assert sample(400, 0.5, seed=3)[0] == first[0]
    other = sample(400, 0.5, seed=4)
    assert (other["name"], other["number"]) != (first["name"], first["number"])
    assert other["before"] != first["before"]


def test_each_trial_has_a_text_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bytes] = []

    def score(network: object, windows: Sequence[Window], size: int) -> list[Score]:
        given.extend(window.tokens.tobytes() for window in windows)
        return [Score(-1.0 * number, greedy=number > 0) for number in range(len(windows))]

    monkeypatch.setattr(needle, "score_windows", score)
    network: Any = None
    for _ in range(2):
        haystack = generated_haystack(400, 5, BYTES)
        found = needle.find_needles(network, BYTES, haystack, (300, 400), (0.5, 1.0), 3, 5, 1, lambda samples: None)
    assert len(set(given)) == 12
    assert given[:12] == given[12:]
    results = [(each.found, each.log_probability) for each in found]
    assert results == [(2 / 3, -1.0), (1.0, -4.0)] * 2


def test_a_text_of_ones_own_is_repeated_where_it_is_short(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("One line\nand more of it without an end")
    with IndexedDatasetWriter(tmp_path / "mine", np.uint16, BYTES.identity()) as writer:
        add_document(writer, [*b"One line\nand more of it without an end", BYTES.eod])
        writer.finish()
    text, tokens = (read_haystack(str(tmp_path / name), ["text"], BYTES, True) for name in ("mine.txt", "mine"))
    assert np.array_equal(text.tokens, tokens.tokens)
    assert np.flatnonzero(text.ends).tolist() == [8]
    found = sample(500, 0.5, haystack=text)
    whole = (found["before"] + found["behind"]).encode()
    assert whole in bytes(text.tokens.tolist()) * 20
    assert found["before"].endswith("\n")
    unending = Haystack("one line", text.tokens, np.zeros_like(text.ends))
    found = sample(500, 0.25, haystack=unending)
    assert len(found["before"]) == round(0.25 * (len(found["before"]) + len(found["behind"])))


def test_the_context_and_the_number_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    """The number has the same tokens in both places, and a sample begins as documents do."""
    tokenizer = load_tokenizer_json(str(write_template_tokenizer(tmp_path)), True, "auto")
    window = needle_window(tokenizer, generated_haystack(90, 0, tokenizer), 90, 0.5, random.Random(0))
    assert window.tokens[0] == 0
    number = window.tokens[-window.counted :]
    places = np.lib.stride_tricks.sliding_window_view(window.tokens, window.counted)
    assert (places == number).all(axis=1).sum() >= 2


def evaluated(run: Path, *flags: object) -> Ended:
    with one_thread():
        return run_tool("evaluate", "--load", run, *flags)


def shares(output: Path) -> list[tuple[int, float, float]]:
    return [(each["length"], each["depth"], each["found"]) for each in json.loads(output.read_text())["needle"]]


FLAGS = ("--needle-lengths", 320, 600, "--needle-depths", 0, 0.4, 1, "--needle-trials", 2)
CELLS = [(length, depth) for length in (320, 600) for depth in (0.0, 0.4, 1.0)]


def test_a_model_that_can_find_them_finds_all_and_a_random_one_none(tmp_path: Path) -> None:
    run = write_finding_model(tmp_path / "finds")
    ended = evaluated(run, *FLAGS, "--output", tmp_path / "o.json")
    assert ended.stderr == ""
    assert shares(tmp_path / "o.json") == [(*cell, 1.0) for cell in CELLS]
    assert [line.split() for line in ended.stdout.splitlines()] == [
        ["length", "found", "at", "0", "found", "at", "0.4", "found", "at", "1"],
        ["320", *["1.00"] * 3],
        ["600", *["1.00"] * 3],
    ]
    (tmp_path / "text.txt").write_text("A text without the verb that is in the needle.".replace(" is ", " stands ") * 9)
    short = ("--needle-lengths", 320, "--needle-trials", 1, "--output")
    evaluated(run, *short, tmp_path / "text.json", "--needle-haystack", tmp_path / "text.txt")
    assert shares(tmp_path / "text.json") == [(320, depth, 1.0) for depth in (0, 0.25, 0.5, 0.75, 1)]
    evaluated(write_finding_model(tmp_path / "random", planted=False), *short, tmp_path / "r.json")
    assert shares(tmp_path / "r.json") == [(320, depth, 0.0) for depth in (0, 0.25, 0.5, 0.75, 1)]


def test_a_model_that_sees_the_end_of_the_text_finds_what_is_there(tmp_path: Path) -> None:
    """It sees 350 tokens."""
    run = write_finding_model(tmp_path / "run", sees=350)
    evaluated(run, *FLAGS, "--output", tmp_path / "o.json")
    assert shares(tmp_path / "o.json") == [(*cell, float(cell not in [(600, 0.0), (600, 0.4)])) for cell in CELLS]


@one_thread()
def test_a_number_is_found_exactly_if_greedy_generation_writes_it(tmp_path: Path) -> None:
    network = load_network(open_model(write_finding_model(tmp_path / "run", sees=350)), ParallelMesh())
    haystack = generated_haystack(600, 0, BYTES)
    windows = [needle_window(BYTES, haystack, 600, depth, random.Random(0)) for depth in (0.0, 1.0)]
    prompts = [window.tokens[: -window.counted].tolist() for window in windows]
    most, greedy = len(" 1234567"), Sampling(temperature=0.0)
    written: list[list[object]] = [[], []]
    for row, event in generate(network, prompts, batch_size=2, max_new_tokens=most, ends=(), sampling=greedy):
        written[row].append(event)
    numbers = [window.tokens[-window.counted :].tolist() for window in windows]
    same = [events[:most] == number for events, number in zip(written, numbers, strict=True)]
    assert same == [score.greedy for score in score_windows(network, windows, 2)] == [False, True]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--needle-lengths", 100], "--needle-lengths 100: the needle and its question alone take 1"),
        (["--needle-trials", 3], "--needle-trials is for --needle-lengths, which is not given"),
        (["--needle-lengths", 300, 300], "--needle-lengths has a value twice: give each once"),
        (["--needle-lengths", 300, "--needle-depths", 1.5], "--needle-depths 1.5: must be from 0 to 1"),
        (["--needle-lengths", 300, "--needle-haystack", "missing.txt"], "missing.txt cannot be read"),
    ],
)
def test_what_cannot_be_searched_is_refused(flags: Sequence[object], message: str, tmp_path: Path) -> None:
    text = ["--text", __file__] if flags[0] == "--needle-trials" else []
    ended = evaluated(write_finding_model(tmp_path / "run"), *text, *flags)
    assert ended.code == 64, ended.stderr
    assert message in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_tokens_without_text_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="the model has a NullTokenizer, which has no text for a needle"):
        generated_haystack(300, 0, NullTokenizer(9))

"""Evaluation: windows that predict each token once, documents without their neighbours, figures."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.data.tokenizers import Tokenizer
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.data.tokenizers.huggingface import load_tokenizer_json
from megalite.data.tokenizers.null import NullTokenizer
from megalite.errors import ConfigurationError, DataError
from megalite.inference.documents import (
    beginning_of_documents,
    context_of_documents,
    limited,
    read_texts,
    read_token_files,
)
from megalite.inference.perplexity import Figures, table, together
from megalite.inference.scoring import Window, batches, score_windows, sliding_windows
from megalite.parallel.mesh import ParallelMesh
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from megalite.process import progress
from tests.distributed.inference_run import initialized_network, whole_weights
from tests.distributed.layout_cell import Cell, oracle
from tests.distributed.layout_expected import one_thread
from tests.harness.close import assert_number_close
from tests.harness.template_tokenizer import write_template_tokenizer
from tests.harness.terminal import read_to_end
from tests.harness.token_files import add_document
from tests.harness.tool import run_tool

BYTES = ByteTokenizer()


# ---------------------------------------------------------------------------------------------------- windows


@given(st.data(), st.integers(0, 40), st.integers(1, 12))
def test_each_token_is_predicted_once_with_as_much_before_it_as_fits(
    data: st.DataObject, size: int, length: int
) -> None:
    stride, before = data.draw(st.integers(1, length)), data.draw(st.integers(1, length))
    document, context = np.arange(100, 100 + size), list(range(before))
    whole = [*context, *document.tolist()]
    predicted: list[int] = []
    for number, window in enumerate(sliding_windows(document, context, length, stride)):
        tokens = window.tokens.tolist()
        end = len(context) + len(predicted) + window.counted
        assert tokens == whole[max(end - length - 1, 0) : end]
        assert 1 <= window.counted <= (stride if number else length)
        predicted += tokens[-window.counted :]
    assert predicted == document.tolist()


def test_a_document_that_fits_is_one_window() -> None:
    (window,) = sliding_windows(np.array([5, 6, 7]), [9], 3, 1)
    assert window.tokens.tolist() == [9, 5, 6, 7]
    assert window.counted == 3


@pytest.mark.wide
@given(st.lists(st.integers(2, 9)), st.integers(1, 4))
def test_batches_hold_every_window_once_alike_ones_together(lengths: list[int], size: int) -> None:
    windows = [Window(np.zeros(length), 1) for length in lengths]
    found = batches(windows, size)
    assert all(len(batch) == size for batch in found[:-1])
    assert all(0 < len(batch) <= size for batch in found)
    order = [number for batch in found for number in batch]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[number] for number in order] == sorted(lengths, reverse=True)


@one_thread()
def test_scores_are_the_oracles_of_what_counts() -> None:
    cell = Cell("llama")
    weights, network = whole_weights(cell), initialized_network(ParallelMesh(), cell)

    def likeliest(tokens: list[int]) -> int:
        positions = torch.arange(len(tokens))[None]
        return int(oracle(cell).logits(weights, torch.tensor([tokens]), positions)[0, -1].argmax())

    text = [3, 1, 4]
    for _ in range(5):
        text.append(likeliest(text))
    wrong = [*text[:-1], (text[-1] + 1) % 10]
    windows = [
        Window(np.array(tokens), counted) for tokens, counted in ((text, 5), (text, 7), (wrong, 5), (wrong[1:], 1))
    ]
    scores = score_windows(network, windows, 2)
    assert [score.greedy for score in scores] == [True, False, False, False]
    logits = oracle(cell).logits(weights, torch.tensor([wrong]), torch.arange(8)[None])[0].log_softmax(-1)
    expected = sum(logits[place - 1, wrong[place]].item() for place in range(3, 8))
    assert_number_close(scores[2].log_probability, expected)
    assert score_windows(network, [], 2) == []


def test_padding_of_the_vocabulary_is_never_the_likeliest_token() -> None:
    """Its logits are 0, and here those of all tokens are less."""
    network = initialized_network(ParallelMesh(), Cell(vocabulary="odd", tied=False))
    head = network.stage.head
    assert head is not None
    with torch.no_grad():
        head.norm.weight.zero_()
        head.norm.bias.fill_(1.0)
        (rows,) = head.output.weights
        rows[: network.vocab_size], rows[7] = -2.0, -1.0
        assert rows[network.vocab_size :].count_nonzero() == 0 < len(rows) - network.vocab_size
    (score,) = score_windows(network, [Window(np.array([3, 7, 7]), 2)], 1)
    assert score.greedy


# ---------------------------------------------------------------------------------------------------- documents


@pytest.fixture
def beginning(tmp_path: Path) -> Path:
    return write_template_tokenizer(tmp_path)


def test_what_stands_before_a_document_is_the_templates_beginning_or_the_end_of_another(beginning: Path) -> None:
    assert beginning_of_documents(BYTES) == []
    assert context_of_documents(BYTES) == [256]
    for included, before, context in ((True, [0], [0]), (False, [], [1])):
        tokenizer = load_tokenizer_json(str(beginning), included, "auto")
        assert beginning_of_documents(tokenizer) == before
        assert context_of_documents(tokenizer) == context


def write(prefix: Path, documents: list[list[list[int]]], identity: dict[str, object] | None = None) -> str:
    """Write documents of sequences of tokens as a token file."""
    with IndexedDatasetWriter(prefix, np.uint16, identity) as writer:
        for document in documents:
            lengths = [len(sequence) for sequence in document]
            add_document(writer, [token for sequence in document for token in sequence], lengths)
        writer.finish()
    return str(prefix)


def test_documents_of_token_files_are_bare(tmp_path: Path, beginning: Path) -> None:
    prefix = write(tmp_path / "data", [[[0, 3, 4, 1]], [[0, 3], [0, 4, 1]], [[1]], [], [[4, 1, 3]]])
    tokenizer = load_tokenizer_json(str(beginning), True, "auto")
    (found,) = read_token_files([prefix], tokenizer)
    assert [tokens.tolist() for tokens in found.tokens] == [[3, 4], [3, 0, 4], [], [], [4, 1, 3]]
    assert found.count == 8
    assert found.text_bytes is None
    assert found.why_no_bytes is not None
    assert "document 1 has other tokens" in found.why_no_bytes  # where the mark of a beginning stands in the middle
    assert found.weight is None


def test_bytes_of_token_files_are_those_of_their_text(tmp_path: Path, beginning: Path) -> None:
    words = load_tokenizer_json(str(beginning), True, "auto")
    (found,) = read_token_files([write(tmp_path / "words", [[[0, 3, 4, 1]], [[0, 3], [4, 1]]])], words)
    assert found.text_bytes == len("a b") + len("a") + len("b")  # a sequence is a text
    text = [[*"né".encode(), 256]]
    (found,) = read_token_files([write(tmp_path / "bytes", [text, [], text])], BYTES)
    assert (found.text_bytes, found.why_no_bytes) == (6, None)


@pytest.mark.parametrize(
    ("tokenizer", "document", "why"),
    [
        (NullTokenizer(9), [1, 2, 9], "NullTokenizer is for data that is already tokens"),
        (BYTES, [97, 195, 256], "document 0 has other tokens"),  # half of a character
        (BYTES, [97, 256, 97, 256], "document 0 has other tokens"),  # two documents stored as one
    ],
)
def test_where_the_text_cannot_be_told_there_are_no_bits_per_byte(
    tokenizer: Tokenizer, document: list[int], why: str, tmp_path: Path
) -> None:
    (found,) = read_token_files([write(tmp_path / "data", [[document]])], tokenizer)
    assert found.text_bytes is None
    assert found.why_no_bytes is not None
    assert why in found.why_no_bytes
    shown = table([Figures(found.name, 1, 2, 2.0, None, found.why_no_bytes)]).splitlines()
    assert shown[-1] == f"no bits per byte of {found.name}: {found.why_no_bytes}"


def test_several_token_files_keep_their_weights_and_are_cut_each(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [[[1, 256]], [[2, 256]], [[3, 256]]], BYTES.identity())
    b = write(tmp_path / "b", [[[4]]])
    found = read_token_files(["3", a, "1", b], BYTES, limit=2)
    assert [each.weight for each in found] == [0.75, 0.25]
    assert [[tokens.tolist() for tokens in each.tokens] for each in found] == [[[1], [2]], [[4]]]
    assert [len(each.tokens) for each in read_token_files([a, b], BYTES, limit=0.5)] == [2, 1]
    assert [limited(10, limit) for limit in (None, 3, 30, 0.25, 1)] == [10, 3, 10, 3, 1]


def test_each_field_of_a_record_is_a_document_of_its_own(tmp_path: Path) -> None:
    records = [{"a": "né", "b": ["x", "yz"]}, {"a": "", "b": "w"}]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "text.txt").write_text("whole")
    files = [str(tmp_path / "text.jsonl"), str(tmp_path / "text.txt")]
    lines, text = read_texts(files, ["a", "b"], BYTES)
    assert [bytes(tokens.tolist()).decode() for tokens in lines.tokens] == ["né", "xyz", "", "w"]
    assert lines.text_bytes == 7
    assert [bytes(tokens.tolist()).decode() for tokens in text.tokens] == ["whole", "whole"]
    assert [len(each.tokens) for each in read_texts(files, ["a"], BYTES, limit=1)] == [1, 1]


def test_data_that_cannot_be_predicted_are_refused(tmp_path: Path, beginning: Path) -> None:
    tokenizer = load_tokenizer_json(str(beginning), True, "auto")
    with pytest.raises(DataError, match="has no tokens"):
        read_token_files([write(tmp_path / "empty", [[[1]], []])], tokenizer)
    with pytest.raises(DataError, match=r"document 1 of .* has tokens from 3 to 9, but the vocabulary"):
        read_token_files([write(tmp_path / "other", [[[2]], [[3, 9]]])], tokenizer)
    numbers = NullTokenizer(8)  # and the end of document, 8
    read_token_files([write(tmp_path / "last", [[[7, 8, 7]]])], numbers)
    with pytest.raises(DataError, match="has tokens from 7 to 9, but the vocabulary of the model has 9"):
        read_token_files([write(tmp_path / "size", [[[7, 9]]])], numbers)
    with pytest.raises(DataError, match="was made with the tokenizer"):
        read_token_files([write(tmp_path / "bytes", [[[2]]], BYTES.identity())], tokenizer)
    with pytest.raises(DataError, match="does not exist"):
        read_token_files([str(tmp_path / "none")], tokenizer)
    damaged = write(tmp_path / "damaged", [[[2]], [[3]]])
    Path(f"{damaged}.bin").write_bytes(np.array([2, 2], np.uint16).tobytes())
    read_token_files([damaged], tokenizer, verify=False)
    with pytest.raises(DataError, match=r"damaged\.bin is damaged: bytes 0 to 3 have another checksum"):
        read_token_files([damaged], tokenizer)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"other": "b"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2: no field 'text' \(--json-keys\)"):
        read_texts([str(tmp_path / "bad.jsonl")], ["text"], BYTES)
    with pytest.raises(DataError, match=r"missing\.txt cannot be read"):
        read_texts([str(tmp_path / "missing.txt")], ["text"], BYTES)
    (tmp_path / "words.jsonl").write_text('\n{"text": "1 two"}\n')
    with pytest.raises(DataError, match=r"words\.jsonl:2 cannot be encoded"):
        read_texts([str(tmp_path / "words.jsonl")], ["text"], NullTokenizer(9))


# ---------------------------------------------------------------------------------------------------- figures


def test_figures_of_several_data_sets() -> None:
    a, b = Figures("a", 2, 30, 2.0, text_bytes=60), Figures("b", 1, 10, 4.0, text_bytes=20)
    assert math.isclose(a.perplexity, math.e**2)
    assert a.bits_per_byte is not None
    assert math.isclose(a.bits_per_byte, 1 / math.log(2))
    every = together([a, b])
    assert (every.name, every.documents, every.tokens, every.loss, every.text_bytes) == ("all", 3, 40, 2.5, 80)
    blend = together([a, b], [0.25, 0.75])
    assert (blend.name, blend.loss, blend.text_bytes, blend.bits_per_byte) == ("blend", 3.5, None, None)
    assert together([a, Figures("c", 1, 1, 1.0)]).text_bytes is None
    assert Figures("d", 1, 1, 1e4).perplexity == math.inf


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    with progress.show_progress("predicting", 3000, "tokens") as advance:
        advance(1000)
    assert capsys.readouterr().err == "predicting: 1,000 of 3,000 tokens\n"
    terminal, stderr = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with monkeypatch.context() as patch, os.fdopen(stderr, "w") as stream:
        patch.setattr(sys, "stderr", stream)
        with progress.show_progress("predicting", 3000, "tokens") as advance:
            advance(1000)
    shown = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", read_to_end(terminal))  # without colours
    assert "predicting ━" in shown
    assert "1000/3000 tokens" in shown


# ---------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "there is nothing to evaluate on: give --data-path, --text, --tasks or --needle-lengths"),
        ("--text a --micro-batch-size 0", "--micro-batch-size 0: must be at least 1"),
        ("--text a --pp 0", "--pipeline-model-parallel-size 0: must be at least 1"),
        ("--text a --limit 0", "--limit 0.0: must be above 0"),
        ("--text a --limit inf", "--limit 'inf': expected a finite number"),
        ("--text a --output= ", "--output '': is blank"),
        ("--text a --num-fewshot 1", "--num-fewshot and --include-path are for --tasks"),
        ("--text a --output /", "--output / is a folder"),
        ("--text a --batch-size 3", "there is no flag --batch-size: did you mean --micro-batch-size?"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(flags: str, message: str) -> None:
    ended = run_tool("evaluate", "--load", "nowhere", *flags.split())
    assert ended.code == 64
    assert message in ended.stderr


def test_without_lm_eval_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "megalite.inference.lm_eval_adapter", raising=False)
    with pytest.raises(ConfigurationError, match=r"pip install lm_eval$"):
        importlib.import_module("megalite.inference.lm_eval_adapter")

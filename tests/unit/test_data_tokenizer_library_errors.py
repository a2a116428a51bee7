"""Errors of Hugging Face's tokenizers library name the file, panics of its native code included."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megalite.data.tokenizers import Tokenizer
from megalite.data.tokenizers.huggingface import HuggingFaceTokenizer
from megalite.data.tokenizers.library_errors import library_errors
from megalite.errors import DataError
from megalite.preprocessing.tokenizer_training import train_byte_level_bpe
from tests.harness.template_tokenizer import write_template_tokenizer
from tests.harness.tokenizers import named_tokenizer
from tests.harness.tool import run_tool

WITHOUT_TOKENS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
PANICS: dict[str, tuple[dict[str, Any], Callable[[Tokenizer], Any]]] = {
    "template": ({"post_processor": WITHOUT_TOKENS}, lambda tokenizer: tokenizer.encode_documents(["a b"])),
    "length": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, lambda tokenizer: tokenizer.encode("a")),
    "offsets": (
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        lambda tokenizer: tokenizer.encode_with_offsets("a"),
    ),
    "decoder": (
        {"decoder": {"type": "Strip", "content": "a", "start": 1, "stop": 1}},
        lambda tokenizer: tokenizer.decode([3]),
    ),
}
PREFIXED = {
    "type": "BPE",
    "vocab": {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "##b": 4, "ab": 5, "é": 6},
    "continuing_subword_prefix": "##",
}
ADDED = {"id": 99, "single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
PADDING = {
    "strategy": {"Fixed": 2**40},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<s>",
}
TRUNCATION = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
UNREADABLE = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}


def write(folder: Path, part: dict[str, Any]) -> Path:
    """Write a tokenizer.json with another part."""
    path = write_template_tokenizer(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | part))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return path


@pytest.mark.parametrize("name", PANICS)
def test_a_panic_in_use_is_an_error_of_the_file(tmp_path: Path, name: str) -> None:
    part, use = PANICS[name]
    path = write(tmp_path, part)
    library = tokenizers.Tokenizer.from_file(str(path))
    tokenizer = HuggingFaceTokenizer(library, 1, {"type": "HuggingFaceTokenizer"}, str(path), fast_encoding="off")
    with pytest.raises(DataError, match=f"tokenizers fails with {re.escape(str(path))}"):
        use(tokenizer)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (UNREADABLE, "is not a tokenizer.json.*Cannot parse precompiled"),
        (PANICS["template"][0], "does not encode.*no entry found for key"),
    ],
)
def test_a_panic_in_opening_is_an_error_of_the_file(tmp_path: Path, part: dict[str, Any], why: str) -> None:
    path = write(tmp_path, part)
    with pytest.raises(DataError, match=f"{re.escape(str(path))} {why}"):
        named_tokenizer("HuggingFaceTokenizer", str(path))


def test_a_vocabulary_without_its_unknown_token_is_an_error_of_the_file(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"<s>": 0, "</s>": 1, "0": 2}, "unk_token": "<unk>"}
    path = write(tmp_path, {"model": model, "post_processor": None})
    with pytest.raises(DataError, match=f"{re.escape(str(path))}: .*Missing"):
        named_tokenizer("HuggingFaceTokenizer", str(path)).encode("a stranger")


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (
            {"model": {**PREFIXED, "merges": [["a", "##b"], ["a", "é"]]}},
            "\"merges\" of its \"model\" has ['a', 'é'], whose second part does not begin with the "
            "\"continuing_subword_prefix\" '##'",
        ),
        (
            {"model": {**PREFIXED, "merges": ["a ##b", "a b"]}},
            '"merges" of its "model" has \'a b\', whose second part does not begin with',
        ),
        (
            {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a" * 10**7, -1.0]]}},
            '"vocab" of its "model" has a token of 10,000,000 bytes',
        ),
        (
            {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1000}}
            | {"added_tokens": [ADDED | {"content": "a" * 2 * 10**6}]},
            'its "normalizer" can make the added tokens 2,000,004,000 bytes long',
        ),
        (
            {"normalizer": {"type": "Prepend", "prepend": "b" * 10**6}, "added_tokens": [ADDED | {"content": "a"}]},
            'its "normalizer" can make a text 1,000,001 times longer',
        ),
    ],
)
def test_what_would_end_the_process_is_refused_before_the_library_has_it(
    tmp_path: Path, part: dict[str, Any], why: str
) -> None:
    path = write(tmp_path, part)
    with pytest.raises(DataError, match=re.escape(f"{path}: {why}")):
        named_tokenizer("HuggingFaceTokenizer", str(path))


def test_tokens_that_are_declared_beside_the_file_count_as_added(tmp_path: Path) -> None:
    grows = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1000}
    path = write(tmp_path, {"normalizer": grows})
    (tmp_path / "added_tokens.json").write_text(json.dumps({"a" * 2 * 10**6: 5}))
    with pytest.raises(DataError, match=f"{re.escape(str(path))}: .* can make the added tokens 2,000,"):
        named_tokenizer("HuggingFaceTokenizer", str(path))


def test_merges_with_their_prefix_are_read(tmp_path: Path) -> None:
    for merges in ([["a", "##b"]], ["a ##b"]):
        path = write(tmp_path, {"model": {**PREFIXED, "merges": merges}})
        assert named_tokenizer("HuggingFaceTokenizer", str(path)).encode("ab") == [5]


def test_padding_of_a_file_has_no_effect_however_long(tmp_path: Path) -> None:
    path = write(tmp_path, {"padding": PADDING, "truncation": TRUNCATION})
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "add_eos_token": true}')
    assert named_tokenizer("HuggingFaceTokenizer", str(path)).encode("0 0 0") == [2, 2, 2]


def test_an_error_of_a_worker_ends_preprocessing_with_the_file(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"<s>": 0, "</s>": 1, "0": 2}, "unk_token": "<unk>"}
    path = write(tmp_path, {"model": model, "post_processor": None})
    (tmp_path / "corpus.jsonl").write_text('{"text": "a b"}\n' * 10)
    files = ("--input", tmp_path / "corpus.jsonl", "--output-prefix", tmp_path / "out")
    flags = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", path, "--workers", 2)
    ended = run_tool("preprocess", *files, *flags)
    assert ended.code == 64
    assert f"tokenizers fails with {path}" in ended.stderr


class PanicException(BaseException):
    """Exception that pyo3 raises for a panic of Rust's code."""


def test_a_panic_in_training_is_an_error_of_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr("megalite.preprocessing.tokenizer_training._texts", broken)
    with pytest.raises(DataError, match=r"cannot train on x.jsonl \(index out of bounds\)"):
        train_byte_level_bpe(["x.jsonl"], ["text"], str(tmp_path), 300)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), OSError(28, "full"), MemoryError(), DataError()])
def test_other_errors_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, library_errors("never"):
        raise error
    assert raised.value is error

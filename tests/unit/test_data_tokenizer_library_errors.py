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

"""Tokenizers: nothing of a text is lost, and what cannot work is told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.data.tokenizers.null import NullTokenizer
from megalite.data.tokenizers.sentencepiece import SentencePieceTokenizer
from megalite.errors import ConfigurationError, DataError
from megalite.preprocessing.tokenizer_training import train_tokenizer
from tests.harness.tokenizers import named_tokenizer

TEXT = "def area(radius):\n    return 3.14159 * radius ** 2\n\n\nclass Circle:\n\tname = 'Zirkel, größer'\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": TEXT * (i + 1)}) + "\n" for i in range(5)))
    return path


@pytest.fixture(scope="module")
def model(corpus: Path) -> str:
    prefix = corpus.parent / "tokenizer"
    assert train_tokenizer([str(corpus)], ["text"], str(prefix), 320) == 320
    return f"{prefix}.model"


@settings(deadline=None)
@given(st.text())
def test_bytes_lose_nothing(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert all(0 <= token < 256 for token in ids)
    assert tokenizer.decode([*ids, tokenizer.eod]) == text


def test_bytes_that_are_no_text_decode_to_something() -> None:
    assert ByteTokenizer().decode([0xC3, 65, 256]) == "\ufffdA"


# U+2581 is how SentencePiece writes a space; a text that holds the character itself gets a space back.
@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_a_trained_tokenizer_loses_nothing(model: str, text: str) -> None:
    tokenizer = SentencePieceTokenizer(model)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(text=st.text(st.sampled_from("ab  \n\u2581é日🙂")))
def test_every_character_belongs_to_a_token(model: str, text: str) -> None:
    for tokenizer in (SentencePieceTokenizer(model), ByteTokenizer()):
        ids, offsets = tokenizer.encode_with_offsets(text)
        assert list(ids) == tokenizer.encode(text)
        assert offsets.shape == (len(ids), 2)
        assert {i for begin, end in offsets for i in range(begin, end)} == set(range(len(text)))
        assert (np.diff(offsets, axis=0) >= 0).all()


def test_the_tokens_of_bytes_have_the_character_that_they_spell(model: str) -> None:
    _, offsets = SentencePieceTokenizer(model).encode_with_offsets("日é")
    assert offsets[-5:].tolist() == [[0, 1], [0, 1], [0, 1], [1, 2], [1, 2]]


def test_numbers_stand_where_their_digits_are() -> None:
    ids, offsets = NullTokenizer(100).encode_with_offsets(" 12  3")
    assert (ids, offsets.tolist()) == ([12, 3], [[1, 3], [5, 6]])
    assert NullTokenizer(100).encode_with_offsets("")[1].shape == (0, 2)


def test_names_of_tokens_are_known(model: str) -> None:
    tokenizer = SentencePieceTokenizer(model)
    assert [tokenizer.token_id(name) for name in ("</s>", "<unk>", "<fim_prefix>")] == [2, 0, None]
    assert ByteTokenizer().token_id("a") is NullTokenizer(100).token_id("5") is None


def test_a_trained_tokenizer_has_an_end_of_document_that_no_text_gives(model: str) -> None:
    tokenizer = SentencePieceTokenizer(model)
    assert (tokenizer.vocab_size, tokenizer.eod) == (320, 2)
    ids = tokenizer.encode(TEXT + "</s>")
    assert tokenizer.eod not in ids
    assert len(ids) < len(TEXT)
    assert tokenizer.decode([*ids, tokenizer.eod]) == TEXT + "</s>"


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_training_twice_gives_the_same_files(corpus: Path, tmp_path: Path, model_type: str) -> None:
    for name in ("a", "b"):
        train_tokenizer([str(corpus)], ["text"], str(tmp_path / name), 300, model_type)
    for suffix in ("model", "vocab"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    vocabulary = (tmp_path / "a.vocab").read_text().split("\n")
    assert vocabulary[2].split("\t")[0] == "</s>"


def test_too_little_text_names_the_largest_vocabulary(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"too little text for --vocab-size 30000; at most \d+"):
        train_tokenizer([str(corpus)], ["text"], str(tmp_path / "t"), 30000)
    with pytest.raises(DataError, match=r"--vocab-size 100 is too small: .* need \d+"):
        train_tokenizer([str(corpus)], ["text"], str(tmp_path / "t"), 100)
    assert list(tmp_path.iterdir()) == []


def test_no_text_and_broken_lines_are_told(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="no text to train on"):
        train_tokenizer([str(path)], ["text"], str(tmp_path / "t"), 300)
    path.write_text('{"text": "one\\ntwo"}\n' * 3 + "{")
    with pytest.raises(DataError, match=r"corpus\.jsonl:4: not a JSON object"):
        train_tokenizer([str(path)], ["text"], str(tmp_path / "t"), 300)


def test_null_tokenizer_adds_the_end_of_document_as_megatron_does() -> None:
    tokenizer = NullTokenizer(1024)
    assert (tokenizer.vocab_size, tokenizer.eod) == (1025, 1024)
    assert tokenizer.encode("5 0  1023") == [5, 0, 1023]
    assert tokenizer.decode([5, 0, 1023]) == "5 0 1023"
    assert tokenizer.encode("1024") == [1024]
    for outside in ("1025", "-1"):
        with pytest.raises(ValueError, match=f"{outside} is not in"):
            tokenizer.encode(f"3 {outside}")


def test_build_gives_what_the_flags_name(model: str) -> None:
    for name in ("SentencePieceTokenizer", "Llama2Tokenizer", "GPTSentencePieceTokenizer"):
        assert named_tokenizer(name, model).identity() == SentencePieceTokenizer(model).identity()
    assert named_tokenizer("ByteTokenizer").vocab_size == 257
    assert named_tokenizer("NullTokenizer", vocab_size=10).vocab_size == 11


def test_a_fast_path_that_is_required_is_taken_or_refused(corpus: Path, tmp_path: Path) -> None:
    for kind in ("bpe", "unigram"):
        train_tokenizer([str(corpus)], ["text"], str(tmp_path / kind), 300, kind)
    bpe, unigram = (
        named_tokenizer("SentencePieceTokenizer", str(tmp_path / f"{kind}.model"), fast_encoding="require")
        for kind in ("bpe", "unigram")
    )
    assert list(bpe.encode_documents(["a text"])[0]) == bpe.encode("a text")
    with pytest.raises(ConfigurationError, match=r"--fast-encoding require: .*it is not a byte-pair encoding"):
        unigram.encode_documents(["a text"])
    assert list(named_tokenizer("ByteTokenizer", fast_encoding="require").encode_documents(["a"])[0]) == [97]


def test_identity_is_of_the_model_and_not_of_its_path(model: str, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.model").write_bytes(Path(model).read_bytes())
    train_tokenizer([str(corpus)], ["text"], str(tmp_path / "other"), 310)
    copy, other = (SentencePieceTokenizer(str(tmp_path / f"{name}.model")) for name in ("copy", "other"))
    assert copy.identity() == SentencePieceTokenizer(model).identity()
    assert other.identity() != copy.identity()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("SentencePieceTokenizer",), "needs --tokenizer-model"),
        (("NullTokenizer",), "needs --vocab-size"),
        (("WordPiece",), "unknown: use one of SentencePieceTokenizer"),
        (("ByteTokenizer", None, 200), "the ByteTokenizer has 257 tokens, more than the 200"),
    ],
)
def test_flags_that_do_not_make_a_tokenizer(arguments: tuple[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        named_tokenizer(*arguments)


def test_model_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.model cannot be read"):
        named_tokenizer("SentencePieceTokenizer", str(tmp_path / "nowhere.model"))
    (tmp_path / "junk.model").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"junk\.model is not a SentencePiece model \(4 bytes\)"):
        named_tokenizer("SentencePieceTokenizer", str(tmp_path / "junk.model"))

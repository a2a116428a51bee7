"""Bytes of the text of tokens: those of a text add up to its size, whatever cuts it."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from megalite.data.tokenizers import Tokenizer
from megalite.data.tokenizers.null import NullTokenizer
from megalite.preprocessing.tokenizer_training import train_tokenizer
from tests.harness.template_tokenizer import write_template_tokenizer
from tests.harness.tokenizers import named_tokenizer

TEXTS = ["the theta heat é日🙂 \n\n  x = 3.14", "aaaa bbb abab the the"] * 5
FIRST_SPACES = {"pieces": 1}
"""Bytes of the space that some put before a text."""


def save(folder: Path, tokenizer: tokenizers.Tokenizer) -> Tokenizer:
    """Write a vocabulary with a special token, and one that is none; return megalite's tokenizer."""
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.add_tokens(["<café>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return named_tokenizer("HuggingFaceTokenizer", str(folder))


def of_bytes(folder: Path) -> Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return save(folder, tokenizer)


def of_pieces(folder: Path) -> Tokenizer:
    """Write a vocabulary like Llama 2's: a mark for a space, one before a text, bytes for what is in no piece."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁theé", "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(after)
    return save(folder, tokenizer)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Return a tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    train_tokenizer([str(folder / "corpus.jsonl")], ["text"], str(folder / "model"), 300)
    ranks = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" the", "é".encode()]
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))
    (folder / "ranks.tiktoken").write_bytes(b"".join(lines))
    special = ("<|end_of_text|>=300",)
    return {
        "ByteTokenizer": named_tokenizer("ByteTokenizer"),
        "SentencePiece": named_tokenizer("SentencePieceTokenizer", str(folder / "model.model")),
        "TikTokenizer": named_tokenizer(
            "TikTokenizer", str(folder / "ranks.tiktoken"), tiktoken_pattern="v2", tokenizer_special_tokens=special
        ),
        "bytes": of_bytes(folder / "bytes"),
        "pieces": of_pieces(folder / "pieces"),
    }


@settings(deadline=None, max_examples=60)
@given(text=st.text(st.sampled_from("the  é日🙂\n3x"), min_size=1))
def test_bytes_of_tokens_add_up_to_those_of_the_text(known: dict[str, Tokenizer], text: str) -> None:
    for name, tokenizer in known.items():
        lengths = tokenizer.byte_lengths()
        assert lengths is not None
        assert len(lengths) == tokenizer.vocab_size, name
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode()) + FIRST_SPACES.get(name, 0), name


def test_only_tokens_of_text_have_bytes(known: dict[str, Tokenizer]) -> None:
    for name, tokenizer in known.items():
        lengths = tokenizer.byte_lengths()
        assert lengths is not None
        assert lengths[tokenizer.eod] == 0, name
        if (added := tokenizer.token_id("<café>")) is not None:
            assert lengths[added] == len("<café>".encode()), name


def test_nothing_is_said_of_tokens_that_are_not_parts_of_a_text(tmp_path: Path) -> None:
    words = named_tokenizer("HuggingFaceTokenizer", str(write_template_tokenizer(tmp_path)))
    assert NullTokenizer(9).byte_lengths() is words.byte_lengths() is None

"""A tokenizer.json that would fill the memory is refused by its key, and those of usual models are not."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from sentencepiece import SentencePieceTrainer, sentencepiece_model_pb2
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors

from megalite.data.tokenizers.growth import MOST_GROWTH, _growth
from megalite.errors import DataError
from tests.harness.template_tokenizer import write_template_tokenizer
from tests.harness.tokenizers import named_tokenizer

LONG = "x" * (MOST_GROWTH + 1)
REPLACES, TEMPLATES = normalizers.Replace, processors.TemplateProcessing


def charsmap() -> bytes:
    """Return SentencePiece's table for NFKC, as T5 and XLM-R have it."""
    model, read = io.BytesIO(), sentencepiece_model_pb2.ModelProto()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["some words"] * 9),
        model_writer=model,
        vocab_size=20,
        hard_vocab_limit=False,
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
    )
    read.ParseFromString(model.getvalue())
    table: bytes = read.normalizer_spec.precompiled_charsmap
    return table


def opened(folder: Path, **parts: Any) -> None:
    """Open a tokenizer.json with these parts."""
    path = write_template_tokenizer(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.save(str(path))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    named_tokenizer("HuggingFaceTokenizer", str(path))


REFUSED: list[tuple[str, Any]] = [
    ("normalizer", REPLACES("a", LONG)),
    ("normalizer", REPLACES("", LONG)),
    ("normalizer", REPLACES(Regex("[a-z]"), LONG)),
    ("normalizer", normalizers.Prepend(LONG)),
    # Each makes the text ten times longer: some GB of a few bytes.
    ("normalizer", normalizers.Sequence([REPLACES("a", "a" * 10)] * 9)),
    ("normalizer", normalizers.Sequence([normalizers.Sequence([REPLACES(Regex("(?=a)"), "a")] * 5)] * 6)),
    ("normalizer", normalizers.Sequence([normalizers.ByteLevel()] * 30)),
    ("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 30)),
    ("post_processor", TEMPLATES(single="<s> " * (MOST_GROWTH + 1) + "$A", special_tokens=[("<s>", 0)])),
    ("post_processor", processors.Sequence([TEMPLATES(single="$A $A")] * 30)),
    ("decoder", decoders.Replace("a", LONG)),
    ("decoder", decoders.Sequence([decoders.BPEDecoder(suffix="")] * 30)),
]


@pytest.mark.parametrize(("key", "part"), REFUSED, ids=range(len(REFUSED)))
def test_what_would_fill_the_memory_is_refused_by_its_key(tmp_path: Path, key: str, part: Any) -> None:
    with pytest.raises(DataError, match=f'tokenizer.json: its "{key}" can make a text .* times longer'):
        opened(tmp_path, **{key: part})


def test_a_table_of_long_texts_is_refused(tmp_path: Path) -> None:
    table = charsmap() + LONG.encode() + b"\0"
    with pytest.raises(DataError, match='its "normalizer" can make a text'):
        opened(tmp_path, normalizer=normalizers.Precompiled(table))


def test_the_steps_of_usual_models_are_accepted(tmp_path: Path) -> None:
    quotes = [REPLACES("``", '"'), REPLACES("''", '"')]
    spaces = REPLACES(Regex(" {2,}"), "▁")
    table = normalizers.Precompiled(charsmap())
    after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    usual: list[dict[str, Any]] = [
        {
            "normalizer": normalizers.Sequence([normalizers.Prepend("▁"), REPLACES(" ", "▁")]),
            "decoder": decoders.Sequence(after),
        },  # Llama 2
        {"normalizer": normalizers.Sequence([*quotes, normalizers.NFKD(), normalizers.Lowercase(), table, spaces])},
        {
            "normalizer": normalizers.Sequence([table, spaces]),
            "pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
        },  # T5
        {"normalizer": normalizers.Sequence([REPLACES(Regex(r"[\s]"), " ")] * 40)},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(), "decoder": decoders.ByteLevel()},
        {"normalizer": normalizers.BertNormalizer(), "decoder": decoders.WordPiece()},
    ]
    for parts in usual:
        opened(tmp_path, **parts)


@pytest.mark.parametrize("text", ["a", "é", "中", "ab cd", "ﷺ", " a  b ", "İ"])
def test_no_step_makes_a_text_longer_than_computed(text: str) -> None:
    steps = [
        *(REPLACES(pattern, "xyz") for pattern in ("a", "", "ab", Regex("a*"), Regex("[a-c]"), Regex(r"\b"))),
        normalizers.Prepend("▁▁"),
        normalizers.ByteLevel(),
        normalizers.BertNormalizer(),
        normalizers.Precompiled(charsmap()),
    ]
    for step in steps:
        longest = _growth(json.loads(step.__getstate__())) * len(text.encode())
        assert len(step.normalize_str(text).encode()) <= longest, step

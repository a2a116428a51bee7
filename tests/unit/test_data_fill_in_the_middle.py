"""Documents rearranged to fill in their middle: nothing lost, keyed by the sample, of the length they had."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer

from megalite.data.fields import FieldsDataset
from megalite.data.fill_in_the_middle import FillInTheMiddle, FillInTheMiddleDataset, token_by_name
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.data.tokenizers.sentencepiece import SentencePieceTokenizer
from megalite.errors import ConfigurationError

PREFIX, MIDDLE, SUFFIX, PAD, EOD, FILE, BEGIN = 300, 301, 302, 303, 256, 304, 305


class Tokenizer(ByteTokenizer):
    """Bytes, where a pair "ab" is a token of its own; tokens above 256 have names."""

    def token_id(self, name: str) -> int | None:
        return {"<prefix>": PREFIX, "<file>": FILE}.get(name)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for byte in text.encode():
            if byte == ord("b") and ids[-1:] == [ord("a")]:
                ids[-1] = 299
            else:
                ids.append(byte)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text = (token for token in ids if token != BEGIN)
        return b"".join(b"ab" if token == 299 else bytes([token]) for token in text).decode(errors="replace")


def rules(**changes: Any) -> FillInTheMiddle:
    marks: dict[str, Any] = {"prefix": PREFIX, "middle": MIDDLE, "suffix": SUFFIX, "pad": PAD, "eod": EOD}
    return FillInTheMiddle(**(marks | {"rate": 1.0} | changes))


def rearranged(rows: list[list[int]], seed: int = 1, **changes: Any) -> list[list[int]]:
    tokens: Any = [np.array(row) for row in rows]
    dataset = FillInTheMiddleDataset(tokens, Tokenizer(), rules(**changes), seed)
    assert len(dataset) == len(rows)
    return [dataset[sample].tolist() for sample in range(len(rows))]


def restored(tokens: list[int]) -> str:
    """The text of a rearranged document, from where its marks stand."""
    kept, decode = [token for token in tokens if token != PAD], Tokenizer().decode
    if PREFIX not in kept:
        return decode(kept)
    suffix, middle = kept.index(SUFFIX), kept.index(MIDDLE)
    assert kept[0] == PREFIX
    assert suffix < middle
    if suffix == 1:  # <prefix> <suffix> suffix <middle> prefix middle
        return decode(kept[middle + 1 :]) + decode(kept[2:middle])
    return decode(kept[1:suffix]) + decode(kept[middle + 1 :]) + decode(kept[suffix + 1 : middle])


TEXTS = st.lists(st.text("abcé", min_size=1, max_size=12), min_size=1, max_size=4)


@pytest.mark.wide
@settings(deadline=None)
@given(TEXTS, st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 2**32 - 1))
def test_every_character_comes_back_in_its_document(texts: list[str], spm_rate: float, seed: int) -> None:
    # An end of document at the end keeps what is cut off from being text.
    row = [token for text in texts for token in (*Tokenizer().encode(text), EOD)]
    room = 20 * len(texts)
    (tokens,) = rearranged([row + [EOD] * room], seed, spm_rate=spm_rate)
    assert len(tokens) == len(row) + room
    documents = [[]]
    for token in tokens:
        if token == EOD:
            documents.append([])
        else:
            documents[-1].append(token)
    assert [restored(document) for document in documents[: len(texts)]] == texts
    orders = {document[1] == SUFFIX for document in documents[: len(texts)]}
    assert spm_rate == 0.5 or orders <= ({True} if spm_rate else {False, True})


def test_the_orders_are_those_of_the_paper() -> None:
    text = list(b"0123456789")
    for spm_rate, starts in ((0.0, [PREFIX]), (1.0, [PREFIX, SUFFIX])):
        for tokens in rearranged([text + [EOD] * 3] * 50, spm_rate=spm_rate):
            assert tokens[: len(starts)] == starts
            assert restored(tokens[:13]) == "0123456789"
    cuts = {tuple(tokens.index(mark) for mark in (SUFFIX, MIDDLE)) for tokens in rearranged([text + [EOD] * 3] * 50)}
    assert len(cuts) > 20


def test_cuts_fall_anywhere_between_both_ends() -> None:
    """Megatron-LM's rule: two places from 0 to the length, both included and drawn alike, so that any part may be
    empty: equal ones have half the chance of unequal ones.
    """
    found: dict[tuple[int, int], int] = {}
    for tokens in rearranged([[*b"xyz", EOD, EOD, EOD]] * 1600, spm_rate=0.0):
        suffix, middle = tokens.index(SUFFIX), tokens.index(MIDDLE)
        cuts = suffix - 1, 3 - (middle - suffix - 1)
        found[cuts] = found.get(cuts, 0) + 1
    assert len(found) == 10
    for (first, last), count in found.items():
        chance = (1 if first == last else 2) / 16
        assert abs(count - 1600 * chance) < 5 * (1600 * chance) ** 0.5


def test_it_depends_on_seed_and_sample_alone() -> None:
    row = [*b"the same text in every sample", EOD, EOD, EOD]
    np.random.seed(0)
    before = rearranged([row] * 5, rate=0.5)
    np.random.seed(1)
    assert rearranged([row] * 5, rate=0.5) == before
    assert rearranged([row] * 5, seed=2, rate=0.5) != before
    assert len({tuple(tokens) for tokens in before}) > 1


def test_rates_are_shares_of_documents() -> None:
    row = [token for _ in range(100) for token in (*b"some text", EOD)] + [EOD] * 300
    (tokens,) = rearranged([row], rate=0.3, spm_rate=0.25)
    assert 20 <= tokens.count(PREFIX) <= 40
    assert rearranged([row], rate=0.0) == [row]


def test_what_is_too_long_is_cut_and_what_is_too_short_is_padded_without_loss() -> None:
    (cut,) = rearranged([list(b"0123456789")])
    assert len(cut) == 10
    # As single tokens the pairs are one each: the text has fewer tokens than the sample had.
    (padded,) = rearranged([list(b"ab" * 20)], spm_rate=0.0)
    assert len(padded) == 40
    assert padded[-10:] == [PAD] * 10
    fields = FieldsDataset([np.array([*padded, EOD])], EOD, pad=PAD)[0]
    assert fields["loss_mask"].tolist() == [float(token != PAD) for token in [*padded[1:], EOD]]


def test_what_is_no_text_or_has_the_prefix_stays() -> None:
    row = [*"é".encode()[1:], *b"abc", EOD, *b"#no", EOD, EOD]
    assert rearranged([row], no_prefix="#") == [row]


def test_fragments_are_rearranged_by_themselves() -> None:
    row = [*b"one", FILE, *b"two", FILE, *b"three", EOD] + [EOD] * 12
    (tokens,) = rearranged([row], separator=FILE, fragment_rate=1.0)
    assert len(tokens) == len(row)
    files = [[]]
    for token in tokens[: tokens.index(EOD)]:
        if token == FILE:
            files.append([])
        else:
            files[-1].append(token)
    assert [restored(file) for file in files] == ["one", "two", "three"]
    assert [file[0] for file in files] == [PREFIX] * 3
    assert rearranged([row], separator=FILE, fragment_rate=0.0) == [row]


def test_what_stands_before_a_text_stays_there() -> None:
    text = [*b"0123456789"]
    for spm_rate in (0.0, 1.0):
        (tokens,) = rearranged(
            [[BEGIN, *text, EOD, BEGIN, *text, EOD, EOD, EOD, EOD, EOD, EOD, EOD]], spm_rate=spm_rate
        )
        for document in (tokens[:14], tokens[15:29]):
            assert document[0] == BEGIN
            assert restored(document[1:]) == "0123456789"


def test_a_space_is_text_though_sentencepiece_gives_none_for_it(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    tokens: Any = [np.array([*tokenizer.encode("  ab ab"), tokenizer.eod, tokenizer.eod] + [tokenizer.eod] * 20)]
    marks = FillInTheMiddle(3, 4, 5, 6, tokenizer.eod, rate=1.0, spm_rate=0.0)
    (first, *rest) = FillInTheMiddleDataset(tokens, tokenizer, marks, 1)[0]
    assert first == 3
    assert "".join(tokenizer.decode([token]) for token in rest).count("a") == 2


def sentencepiece(folder: Path) -> SentencePieceTokenizer:
    """A model as Llama's that has the marks as control pieces, which no text gives."""
    SentencePieceTrainer.train(
        sentence_iterator=iter(["ab ab  ab"] * 50),
        model_prefix=str(folder / "m"),
        vocab_size=280,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return SentencePieceTokenizer(str(folder / "m.model"))


def test_marks_that_no_text_gives_are_found_by_name(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    names = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")
    assert [token_by_name(tokenizer, name, "--fim") for name in names] == [3, 4, 5, 6]
    assert token_by_name(ByteTokenizer(), "\n", "--fim-split-sample") == 10


def test_a_token_has_one_meaning() -> None:
    with pytest.raises(
        ConfigurationError, match=r"the end of a document \(--fim-eod-token\) and --fim-pad-token are the same"
    ):
        rules(pad=EOD)
    with pytest.raises(ConfigurationError, match="--fim-prefix-token and --fim-suffix-token are the same token, 300"):
        rules(suffix=PREFIX)
    with pytest.raises(ConfigurationError, match="--fim-pad-token and --fim-split-sample are the same token, 303"):
        rules(separator=PAD)


def test_marks_must_be_tokens() -> None:
    assert token_by_name(Tokenizer(), "<prefix>", "--fim-prefix-token") == PREFIX
    with pytest.raises(ConfigurationError, match=r"--fim-middle-token <fim_middle> is not a token of the vocabulary"):
        token_by_name(ByteTokenizer(), "<fim_middle>", "--fim-middle-token")

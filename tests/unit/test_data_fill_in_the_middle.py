"""Documents rearranged to fill in their middle: nothing lost, keyed by the sample, of the length they had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.fields import sample_fields
from megalite.data.fill_in_the_middle import FillInTheMiddle, FillInTheMiddleDataset, token_by_name
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.errors import ConfigurationError

PREFIX, MIDDLE, SUFFIX, PAD, EOD, FILE = 300, 301, 302, 303, 256, 304


class Tokenizer(ByteTokenizer):
    """Bytes, where a pair "ab" is a token of its own; tokens above 256 have names."""

    def encode(self, text: str) -> list[int]:
        if text.startswith("<") and text.endswith(">"):
            return [{"<prefix>": PREFIX, "<file>": FILE}[text]]
        ids: list[int] = []
        for byte in text.encode():
            if byte == ord("b") and ids[-1:] == [ord("a")]:
                ids[-1] = 299
            else:
                ids.append(byte)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(b"ab" if token == 299 else bytes([token]) for token in ids).decode(errors="replace")


def rules(**changes: Any) -> FillInTheMiddle:
    return FillInTheMiddle(PREFIX, MIDDLE, SUFFIX, PAD, EOD, **({"rate": 1.0} | changes))


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
    fields = sample_fields(np.array([*padded, EOD]), EOD, pad=PAD)
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


def test_marks_must_be_tokens() -> None:
    assert token_by_name(Tokenizer(), "<prefix>", "--fim-prefix-token") == PREFIX
    with pytest.raises(ConfigurationError, match=r"--fim-middle-token <fim_middle> is not one token.* but 12"):
        token_by_name(ByteTokenizer(), "<fim_middle>", "--fim-middle-token")

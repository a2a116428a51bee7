"""Special tokens of plain .tiktoken files, which the files do not name: published numbers, or those that are given."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import tiktoken

from megalite.data.tokenizers.tiktoken import PATTERNS, PUBLISHED, _special_after
from megalite.errors import ConfigurationError
from tests.harness.tokenizers import named_tokenizer

RANKS = {token: rank for rank, token in enumerate([*(bytes([i]) for i in range(256)), b"he", b"ll", b"hell"])}
NAMES = ("<|end_of_text|>", "<|begin_of_text|>", "<|eot_id|>")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "ranks.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in RANKS.items()))
    return str(path)


def test_tokens_have_the_numbers_that_are_given_even_with_gaps(file: str) -> None:
    numbers = dict(zip(NAMES, (260, 259, 268), strict=True))
    given = tuple(f"{name}={number}" for name, number in numbers.items())
    ours = named_tokenizer("TikTokenizer", file, tiktoken_pattern="cl100k", tokenizer_special_tokens=given)
    theirs = tiktoken.Encoding("x", pat_str=PATTERNS["cl100k"], mergeable_ranks=RANKS, special_tokens=numbers)
    text = "<|begin_of_text|>hello<|eot_id|> hell<|end_of_text|>"
    assert ours.encode(text) == theirs.encode(text, allowed_special="all")
    assert (ours.eod, ours.vocab_size) == (260, 269)
    assert ours.decode([*ours.encode(text), 263]) == "hello hell"
    more = named_tokenizer("TikTokenizer", file, 300, tiktoken_pattern="cl100k", tokenizer_special_tokens=given)
    assert more.identity() == ours.identity()


@pytest.mark.parametrize(("count", "last"), PUBLISHED)
def test_published_files_have_their_published_tokens(count: int, last: int) -> None:
    ranks = {b"%d" % i: i for i in range(count - 1)} | {b"last": last}
    found = _special_after(ranks, (), "ranks.tiktoken")
    known = {50_256: {"<|endoftext|>": 50_256}, 50_280: {"<|endoftext|>": 50_256}}
    known |= {100_256: {"<|endoftext|>": 100_257, "<|fim_suffix|>": 100_260, "<|endofprompt|>": 100_276}}
    known |= {128_000: {"<|end_of_text|>": 128_001, "<|begin_of_text|>": 128_000, "<|eot_id|>": 128_009}}
    known |= {199_998: {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018}}
    assert known[count].items() <= found.items()
    assert next(iter(found.items())) == next(iter(known[count].items()))
    with pytest.raises(
        ConfigurationError, match=rf"'{'<|endoftext|>' if count != 128_000 else NAMES[0]}=".replace("|", r"\|")
    ):
        _special_after(ranks, [next(iter(found))], "ranks.tiktoken")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (NAMES, "'<|end_of_text|>=259' '<|begin_of_text|>=260' '<|eot_id|>=261' (numbers after the last rank)"),
        (("<a>=259", "b"), "give NAME=ID for each, such as 'b="),
        (("<a>=258",), "258 is the rank of another token"),
        (("<a>=259", "<b>=259"), "a name or a number twice"),
        (("<a>=99999999",), "is not below 16777216"),
    ],
)
def test_numbers_that_cannot_be_are_refused(file: str, given: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        named_tokenizer("TikTokenizer", file, tokenizer_special_tokens=given)
    assert why in str(raised.value)

"""Text shown piece by piece is the text, and no piece ends inside a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.data.tokenizers import build_tokenizer
from megalite.errors import ConfigurationError
from megalite.inference.generation import encode_prompt, stream_text

BYTES = build_tokenizer("ByteTokenizer")


@given(st.text(min_size=1), st.data())
def test_the_pieces_make_up_the_text_and_show_whole_characters(text: str, data: st.DataObject) -> None:
    tokens = BYTES.encode(text)
    cut = data.draw(st.integers(0, len(tokens)))
    pieces = list(stream_text(BYTES, tokens[:cut], tokens[cut:]))
    assert "".join(pieces) == text
    if "�" not in text:
        assert "�" not in "".join(pieces)


@given(st.lists(st.integers(0, 256)))
def test_bytes_that_never_make_a_character_are_shown_at_the_end(tokens: list[int]) -> None:
    assert "".join(stream_text(BYTES, [], tokens)) == BYTES.decode(tokens)


def test_a_character_is_shown_as_soon_as_it_is_whole() -> None:
    tokens = BYTES.encode("aé€")
    assert list(stream_text(BYTES, tokens[:1], tokens[1:])) == ["a", "", "é", "", "", "€", ""]


def test_a_prompt_that_cannot_be_encoded_is_the_users_error() -> None:
    with pytest.raises(ConfigurationError, match="--prompt 'one'"):
        encode_prompt(build_tokenizer("NullTokenizer", vocab_size=10), "one")

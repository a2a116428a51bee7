"""Text shown piece by piece is the text, and no piece ends inside a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.errors import ConfigurationError
from megalite.inference.text import TextStream, encode_prompt, encode_prompts, in_order
from tests.harness.template_tokenizer import write_template_tokenizer
from tests.harness.tokenizers import named_tokenizer

BYTES = named_tokenizer("ByteTokenizer")


def stream_text(prompt: list[int], new: list[int]) -> list[str]:
    """The parts, one before anything new has come, one at each token and one at the end."""
    stream = TextStream(BYTES, prompt)
    parts = [stream.part()]
    for token in new:
        stream.tokens.append(token)
        parts.append(stream.part())
    return [*parts, stream.part(ended=True)]


@given(st.text(min_size=1), st.data())
def test_the_pieces_make_up_the_text_and_show_whole_characters(text: str, data: st.DataObject) -> None:
    tokens = BYTES.encode(text)
    cut = data.draw(st.integers(0, len(tokens)))
    pieces = stream_text(tokens[:cut], tokens[cut:])
    assert "".join(pieces) == text
    if "�" not in text:
        assert "�" not in "".join(pieces)


@pytest.mark.wide
@given(st.lists(st.integers(0, 256)))
def test_bytes_that_never_make_a_character_are_shown_at_the_end(tokens: list[int]) -> None:
    assert "".join(stream_text([], tokens)) == BYTES.decode(tokens)


def test_a_character_is_shown_as_soon_as_it_is_whole() -> None:
    tokens = BYTES.encode("aé€")
    assert stream_text(tokens[:1], tokens[1:]) == ["a", "", "é", "", "", "€", ""]


def test_a_prompt_that_cannot_be_encoded_is_the_users_error() -> None:
    with pytest.raises(ConfigurationError, match="prompt 'one'"):
        encode_prompt(named_tokenizer("NullTokenizer", vocab_size=10), "one")


def test_texts_come_in_order_each_after_its_prompt() -> None:
    prompts = [BYTES.encode(text) for text in ("a", "b", "c")]
    events = [(1, 0xC3), (0, ord("x")), (1, 0xA9), (2, ord("z")), (1, "stop"), (0, ord("y"))]
    pieces = [(p.index, p.text, p.finish) for p in in_order(BYTES, prompts, [*events, (0, "length"), (2, "length")])]
    assert [piece for piece in pieces if piece[1] or piece[2]] == [
        (0, "a", None),
        (0, "x", None),
        (0, "y", None),
        (0, "", "length"),
        (1, "b", None),
        (1, "é", "stop"),
        (2, "c", None),
        (2, "z", None),
        (2, "", "length"),
    ]


def test_prompts_begin_as_documents_do_unless_they_say_it(tmp_path: Path) -> None:
    tokenizer = named_tokenizer("HuggingFaceTokenizer", str(write_template_tokenizer(tmp_path)))
    assert encode_prompts(tokenizer, ["a b", "<s> a", ""]) == [[0, 3, 4], [0, 3], [0]]
    assert encode_prompts(BYTES, ["a"]) == [[97]]

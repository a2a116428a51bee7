"""Common interface of all tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Ids = Sequence[int] | np.ndarray
"""Tokens of a text, in the form that the tokenizer's library returns."""


def character_offsets(text: str, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Convert the byte ranges of tokens in the text's UTF-8 to character ranges, [tokens, 2].

    A token that covers part of a character gets the entire character. A token without bytes gets the next character:
    if several tokens spell one character, SentencePiece assigns all its bytes to the last of them.
    """
    data = np.frombuffer(text.encode() + b"\0", np.uint8)
    begun = np.cumsum((data & 0xC0) != 0x80)  # number of characters up to and including the one of each byte
    return np.stack([begun[begins] - 1, np.minimum(begun[np.maximum(ends - 1, begins)], len(text))], axis=1)


class Tokenizer(Protocol):
    """Converter of text to tokens and back."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without padding for parallel ranks: tokens are in [0, vocab_size)."""

    @property
    def eod(self) -> int:
        """The token that ends a document."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens for its beginning or end.

        Raises:
            ValueError: the text cannot be encoded.
        """

    def encode_with_offsets(self, text: str) -> tuple[Sequence[int], np.ndarray]:
        """Return the tokens as `encode` does, and the character range of each token, [tokens, 2].

        A range is the first character that the token covers, entirely or in part, and the one after the last.

        Raises:
            ValueError: the text cannot be encoded.
        """

    def encode_documents(self, texts: Sequence[str]) -> Sequence[Ids]:
        """Return the tokens of many complete documents, computed in native code if possible.

        They include the special tokens that the tokenizer itself adds around each document (few tokenizers do).

        Raises:
            ValueError: a text cannot be encoded.
        """

    def token_id(self, name: str) -> int | None:
        """Return the special or ordinary token with this name in the vocabulary; None if there is none."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; tokens without text are skipped."""

    def byte_lengths(self) -> np.ndarray | None:
        """Return the bytes of text of each token in UTF-8, int64 [vocab_size]; None if tokens are not parts of a text.

        Special tokens have none. The space that some tokenizers put before a text is counted with it.
        """

    def identity(self) -> dict[str, Any]:
        """Return JSON values that identify the tokenizer: equal values mean that every token has the same meaning."""


def beginning_of_documents(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that the tokenizer's own template puts before a document. Few tokenizers have such tokens."""
    text = "0"  # every tokenizer can encode it
    bare, whole = tokenizer.encode(text), [int(token) for token in tokenizer.encode_documents([text])[0]]
    starts = range(len(whole) - len(bare) + 1)
    return whole[: next((start for start in starts if whole[start : start + len(bare)] == bare), 0)]


def begun(tokens: list[int], beginning: list[int]) -> list[int]:
    """Return the tokens of a text after those that begin a document, unless the text itself begins with them."""
    return tokens if tokens[: len(beginning)] == beginning else [*beginning, *tokens]

"""Interface of tokenizers for the rest of the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Ids = Sequence[int] | np.ndarray
"""Tokens of a text, in the form that the tokenizer's library returns."""


def character_offsets(text: str, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the characters of tokens, [tokens, 2], from their bytes in the text's UTF-8.

    A token that covers part of a character gets the whole character; a token of no bytes gets the next one, since
    SentencePiece gives all bytes of a character to the last of the tokens that spell it.
    """
    data = np.frombuffer(text.encode() + b"\0", np.uint8)
    begun = np.cumsum((data & 0xC0) != 0x80)  # characters up to the one that a byte belongs to
    return np.stack([begun[begins] - 1, np.minimum(begun[np.maximum(ends - 1, begins)], len(text))], axis=1)


class Tokenizer(Protocol):
    """Converter of text to tokens and back."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens: tokens are in [0, vocab_size), before any padding for parallel ranks."""

    @property
    def eod(self) -> int:
        """The token that ends a document."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without tokens for its beginning or end.

        Raises:
            ValueError: the text cannot be encoded.
        """

    def encode_with_offsets(self, text: str) -> tuple[Sequence[int], np.ndarray]:
        """Return the tokens as `encode` does, and the characters of each, [tokens, 2].

        A token's characters, covered wholly or in part, are given as the first one and the one after the last.

        Raises:
            ValueError: the text cannot be encoded.
        """

    def encode_documents(self, texts: Sequence[str]) -> Sequence[Ids]:
        """Return the tokens of many whole documents, in native code if there is any.

        Includes tokens that the tokenizer itself puts around each document (few tokenizers do).

        Raises:
            ValueError: a text cannot be encoded.
        """

    def token_id(self, name: str) -> int | None:
        """Return the token with a name in the vocabulary, special or not; None if there is none."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; tokens that stand for no text are skipped."""

    def identity(self) -> dict[str, Any]:
        """Return JSON values that are equal if two tokenizers give the same meaning to every token."""

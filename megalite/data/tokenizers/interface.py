"""What the rest of the program needs to know of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Ids = Sequence[int] | np.ndarray
"""The tokens of a text, in the form that the tokenizer's library gives them in."""


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def vocab_size(self) -> int:
        """Tokens are in [0, vocab_size), before any padding for parallel ranks."""

    @property
    def eod(self) -> int:
        """The token that ends a document."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without any that marks a beginning or an end.

        Raises:
            ValueError: the text cannot be encoded.
        """

    def encode_with_offsets(self, text: str) -> tuple[Sequence[int], np.ndarray]:
        """The tokens that `encode` gives, and the characters that each stands for, wholly or in part: the first, and
        the one behind the last, [tokens, 2].

        Raises:
            ValueError: the text cannot be encoded.
        """

    def encode_documents(self, texts: Sequence[str]) -> Sequence[Ids]:
        """The tokens of many whole documents, with what the tokenizer itself puts around each (few do), in native code
        where there is any.

        Raises:
            ValueError: a text cannot be encoded.
        """

    def token_id(self, name: str) -> int | None:
        """The token that has a name in the vocabulary, special or not; None where none has."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; those that stand for no text give none."""

    def identity(self) -> dict[str, Any]:
        """What must be equal for two tokenizers to mean the same by a token, as JSON values."""

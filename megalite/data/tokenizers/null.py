"""A tokenizer for data without text: benchmarks, `--mock-data`, and corpora that are numbers already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class NullTokenizer:
    """A text is numbers between spaces.

    Args:
        vocab_size: the number of ordinary tokens. As in Megatron-LM, the end of a document comes on top: the
            tokenizer's own `vocab_size` is one more, and `eod` is the last token.
    """

    pad: int | None = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size

    def encode(self, text: str) -> list[int]:
        """The numbers in a text."""
        ids = [int(word) for word in text.split()]
        outside = [token for token in ids if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(f"token {outside[0]} is not in [0, {self.vocab_size})")
        return ids

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers in texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The numbers as text."""
        return " ".join(str(int(token)) for token in ids)

    def identity(self) -> dict[str, Any]:
        """The number of tokens is all there is."""
        return {"type": "NullTokenizer", "vocab_size": self.vocab_size}

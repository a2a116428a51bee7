"""Tokenizer for data without text: benchmarks, `--mock-data`, and corpora that are already numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np


class NullTokenizer:
    """Tokenizer of numbers separated by spaces.

    Args:
        vocab_size: number of ordinary tokens. As in Megatron-LM, the end of a document is an additional token: the
            tokenizer's own `vocab_size` is one more, and `eod` is the last token.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size

    def encode(self, text: str) -> list[int]:
        ids = [int(word) for word in text.split()]
        outside = [token for token in ids if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(f"token {outside[0]} is not in [0, {self.vocab_size})")
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """Return the numbers in a text and their character ranges."""
        places = [word.span() for word in re.finditer(r"\S+", text)]
        return self.encode(text), np.array(places, np.int64).reshape(-1, 2)

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def token_id(self, name: str) -> int | None:
        """Return None: numbers have no other names."""
        return None

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(token)) for token in ids)

    def byte_lengths(self) -> None:
        """Return None: numbers have no text."""

    def identity(self) -> dict[str, Any]:
        return {"type": "NullTokenizer", "vocab_size": self.vocab_size}

"""Tokenizer that needs no file and encodes every text exactly: the bytes of UTF-8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megalite.data.tokenizers.interface import character_offsets


class ByteTokenizer:
    """Tokenizer with the bytes of UTF-8 as tokens 0 to 255, and 256 as the end of a document."""

    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """Return the bytes of a text and their characters."""
        ids = self.encode(text)
        places = np.arange(len(ids))
        return ids, character_offsets(text, places, places + 1)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def token_id(self, name: str) -> int | None:
        """Return None: bytes have no names."""
        return None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes. Bytes that are not valid UTF-8, which a model may sample, become U+FFFD."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def byte_lengths(self) -> np.ndarray:
        return np.repeat([1, 0], [256, 1])

    def identity(self) -> dict[str, Any]:
        """Return the identity: there is only one such tokenizer."""
        return {"type": "ByteTokenizer", "vocab_size": self.vocab_size}

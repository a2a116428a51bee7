"""Characters of a text that tokens cover, for libraries that count bytes."""

from __future__ import annotations

import numpy as np


def character_offsets(text: str, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the characters of tokens, [tokens, 2], from their bytes in the text's UTF-8.

    A token that covers part of a character gets the whole character; a token of no bytes gets the next one, since
    SentencePiece gives all bytes of a character to the last of the tokens that spell it.
    """
    data = np.frombuffer(text.encode() + b"\0", np.uint8)
    begun = np.cumsum((data & 0xC0) != 0x80)  # characters up to the one that a byte belongs to
    return np.stack([begun[begins] - 1, np.minimum(begun[np.maximum(ends - 1, begins)], len(text))], axis=1)

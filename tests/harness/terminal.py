"""The other side of a pseudo-terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator


def read_to_end(terminal: int) -> str:
    """All that is shown until the terminal is closed; it comes little by little."""
    return b"".join(_pieces(terminal)).decode()


def _pieces(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            piece = os.read(terminal, 1 << 16)
        except OSError:  # how Linux tells the end
            return
        if not piece:
            return
        yield piece

"""Reading end of a pseudo-terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator


def read_to_end(terminal: int) -> str:
    """Return all output until the terminal is closed; it arrives in parts."""
    return b"".join(_pieces(terminal)).decode()


def _pieces(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            piece = os.read(terminal, 1 << 16)
        except OSError:  # Linux reports the end in this way
            return
        if not piece:
            return
        yield piece

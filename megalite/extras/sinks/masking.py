"""Texts that leave the machine: none has a name or a password of a URL in it."""

from __future__ import annotations

from megalite.storage import without_credentials

_LONGEST = 300


def masked(text: str) -> str:
    """Return a message of a library as one short line, without credentials."""
    line = " ".join(without_credentials(text).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."

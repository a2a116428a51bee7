"""Texts that leave the machine: none has a name or a password of a URL in it."""

from __future__ import annotations

import re

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s'\"]+@")
_LONGEST = 300


def without_credentials(text: str) -> str:
    """Return the text without what stands before the host in a URL: a user's name and password, or keys."""
    return _CREDENTIALS.sub("", text)


def masked(text: str) -> str:
    """Return a message of a library as one short line, without credentials."""
    line = " ".join(without_credentials(text).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."

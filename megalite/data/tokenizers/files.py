"""Reading the files of tokenizers."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megalite.errors import DataError


def read_tokenizer_file(path: str | Path, flag: str, what: str) -> bytes:
    """A file that `flag` names and that should be `what`. Raises DataError where it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {flag} is {what}") from error


def fingerprint(*contents: bytes) -> str:
    """Tells files of other contents apart, wherever they are."""
    return hashlib.sha256(b"".join(contents)).hexdigest()

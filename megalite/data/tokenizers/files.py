"""Reading of tokenizer files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from megalite.errors import DataError
from megalite.small_files import MIB, parse_json, read_small_file, reason

_LARGEST_BESIDE = 16 * MIB
"""Largest size in bytes of an additional file of a vocabulary; with thousands of special tokens it has 1 to 2 MB."""
LARGEST_VOCABULARY = 1 << 24
"""Largest number of ids, many times that of any real vocabulary; libraries need time and memory in proportion to it."""


def read_tokenizer_file(path: str | Path, flag: str, what: str, folder: Path | None = None) -> bytes:
    """Read a file of a tokenizer.

    Args:
        path: the file.
        flag: the flag that names the file or its folder, for messages.
        what: description of the value that the flag expects, for messages.
        folder: the folder that the flag names, if it names a folder.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return read_small_file(Path(path), folder=folder)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({reason(error)}): {flag} is {what}") from error


def read_text_beside(path: Path, folder: Path | None = None) -> str | None:
    """Return the text of an additional file of a vocabulary, or None if there is no such file.

    Args:
        path: the file.
        folder: the folder of the vocabulary, if it is not the file's own.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return read_small_file(path, largest=_LARGEST_BESIDE, folder=folder or path.parent).decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def read_fields_beside(path: Path) -> dict[str, Any]:
    """Return the fields of the JSON object in an additional file of a vocabulary; none if there is no such file.

    Raises:
        DataError: it cannot be read.
    """
    text = read_text_beside(path)
    try:
        fields = {} if text is None else parse_json(text, larger_numbers=True)
        if not isinstance(fields, dict):
            raise ValueError(f"a JSON {type(fields).__name__}, not an object")
        json.dumps(fields, ensure_ascii=False).encode()  # fails for half of a surrogate pair, which has no UTF-8
    except ValueError as error:
        raise _unreadable(path, error) from error
    return fields


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}, of the tokenizer, cannot be read ({reason(error)}): copy it again, or remove it")


def fingerprint(*contents: bytes) -> str:
    """Return a hash of the contents of files, which does not depend on their paths."""
    return hashlib.sha256(b"".join(contents)).hexdigest()

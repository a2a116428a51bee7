"""`{prefix}.megalite.json` beside a token file: which tokenizer wrote it, and how much it wrote.

The name is one that nobody else uses: `{prefix}.json` is often the text itself.

Megatron-LM's files have none and are accepted as they are; tokens beyond the vocabulary are then found where a
micro-batch is loaded (`megalite/data/loader.py`), as nothing else can tell without reading all of the data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megalite.data.mapped_file import refuse_too_many_open_files
from megalite.errors import DataError
from megalite.files import TemporaryFile

SUFFIX = ".megalite.json"


def side_file_path(prefix: str | Path) -> Path:
    """The file that records the tokenizer."""
    return Path(f"{prefix}{SUFFIX}")


def write_side_file(file: TemporaryFile, tokenizer: dict[str, Any] | None, tokens: int, documents: int) -> None:
    """Write what `check_tokenizer` reads."""
    record = {"tokenizer": tokenizer, "tokens": tokens, "documents": documents}
    file.write((json.dumps(record, indent=2) + "\n").encode())


def recorded_tokenizer(prefix: str | Path) -> dict[str, Any] | None:
    """What identifies the tokenizer the data was made with (`Tokenizer.identity()`), or None where nothing says so.

    Raises:
        DataError: the side file cannot be read.
    """
    path = side_file_path(prefix)
    try:
        recorded: dict[str, Any] | None = json.loads(path.read_text())["tokenizer"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, OSError):
            refuse_too_many_open_files(error)
        raise DataError(
            f"{path} cannot be read as the record of a tokenizer ({error!r}): run tools/preprocess_data.py again, or "
            "remove it to skip the check"
        ) from error
    return recorded


def check_tokenizer(prefix: str | Path, tokenizer: dict[str, Any]) -> None:
    """Refuse a tokenizer (`Tokenizer.identity()`) that is not the one the data was made with, where that is recorded.

    Raises:
        DataError: the tokenizers differ, or the side file cannot be read.
    """
    recorded = recorded_tokenizer(prefix)
    if recorded is not None and recorded != tokenizer:
        raise DataError(
            f"{prefix} was made with the tokenizer {describe_tokenizer(recorded)} (recorded in "
            f"{side_file_path(prefix)}), but this run uses {describe_tokenizer(tokenizer)}: give --tokenizer-type and "
            "--tokenizer-model as then, or preprocess the text again"
        )


def describe_tokenizer(identity: dict[str, Any]) -> str:
    """The identity for a person."""
    return ", ".join(f"{name} {value}" for name, value in identity.items())

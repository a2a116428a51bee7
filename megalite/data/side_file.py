"""Side file `{prefix}.megalite.json` of a token file: a record of its tokenizer, its size, and its checksums.

No other program uses this name, while `{prefix}.json` is often the text itself.

Megatron-LM's files have no such record and are accepted without it. Tokens outside the vocabulary are then found only
when a micro-batch is loaded (`megalite/data/loader.py`), since an earlier check would have to read all data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.atomic_files import TemporaryFile
from megalite.data.mapped_file import refuse_too_many_open_files
from megalite.errors import DataError
from megalite.small_files import MIB, is_count, read_json, reason, shown

SUFFIX = ".megalite.json"
CHUNK = 1 << 26
"""Bytes of a file that share one checksum."""
_LARGEST = 8 * MIB
"""Largest record in bytes: enough for the checksums of more than 20 TiB."""
_LONGEST, _MOST_FIELDS, _LONGEST_FIELD = 1 << 12, 16, 64


@dataclass(frozen=True)
class Record:
    """Record of a token file.

    Attributes:
        tokenizer: identity of the tokenizer (`Tokenizer.identity()`), if known.
        tokens, documents: number of tokens and of documents.
        crc32: checksums of the files "bin" and "idx", one per `CHUNK` bytes; empty in old records.
    """

    tokenizer: dict[str, Any] | None
    tokens: int
    documents: int
    crc32: Mapping[str, Sequence[int]] = field(default_factory=dict)


def side_file_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}{SUFFIX}")


def write_side_file(file: TemporaryFile, record: Record) -> None:
    """Write the record in the format that `read_side_file` reads."""
    fields = {
        "tokenizer": record.tokenizer,
        "tokens": record.tokens,
        "documents": record.documents,
        "crc32": {"chunk_bytes": CHUNK, **record.crc32},
    }
    file.write((json.dumps(fields, indent=2) + "\n").encode())


def read_side_file(prefix: str | Path) -> Record | None:
    """Return the record of a token file, or None if it has no side file.

    Raises:
        DataError: it cannot be read, or is not a valid record.
    """
    path = side_file_path(prefix)
    try:
        return _record(read_json(path, largest=_LARGEST))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        refuse_too_many_open_files(error)
        raise DataError(
            f"{path} cannot be read as the record of a token file ({reason(error)}): copy "
            "it again, run megalite-preprocess again, or remove it to skip the checks"
        ) from error


def _record(found: Any) -> Record:
    """Convert JSON values to a record. Raises ValueError if they are not a valid record."""
    if not isinstance(found, dict) or found.keys() | {"crc32"} != {"tokenizer", "tokens", "documents", "crc32"}:
        raise ValueError("it does not have the right keys")
    tokenizer, tokens, documents, crc32 = found["tokenizer"], found["tokens"], found["documents"], found.get("crc32")
    if not is_count(tokens) or not is_count(documents):
        raise ValueError("tokens and documents are not counts")
    if tokenizer is not None and not _is_identity(tokenizer):
        raise ValueError("its tokenizer is not valid")
    if crc32 is None:
        return Record(tokenizer, tokens, documents)
    if not isinstance(crc32, dict) or crc32.keys() != {"chunk_bytes", "bin", "idx"} or crc32["chunk_bytes"] != CHUNK:
        raise ValueError(f"its checksums are not of chunks of {CHUNK:,} bytes of the .bin and .idx")
    checksums = {name: crc32[name] for name in ("bin", "idx")}
    if not all(isinstance(each, list) and all(is_count(one, 2**32) for one in each) for each in checksums.values()):
        raise ValueError("its checksums are not CRC-32")
    return Record(tokenizer, tokens, documents, checksums)


def _is_identity(value: object) -> bool:
    if not isinstance(value, dict) or not is_count(value.get("vocab_size", 0)) or len(value) > _MOST_FIELDS:
        return False
    if not all(name.isidentifier() and name.isascii() and len(name) <= _LONGEST_FIELD for name in value):
        return False
    return all(
        isinstance(each, int | None) or (isinstance(each, str) and len(each) < _LONGEST) for each in value.values()
    )


def recorded_tokenizer(prefix: str | Path) -> dict[str, Any] | None:
    """Return the recorded identity (`Tokenizer.identity()`) of the data's tokenizer, or None if none is recorded.

    Raises:
        DataError: the side file cannot be read.
    """
    record = read_side_file(prefix)
    return None if record is None else record.tokenizer


def check_tokenizer(prefix: str | Path, record: Record | None, tokenizer: dict[str, Any]) -> None:
    """Check that a tokenizer (`Tokenizer.identity()`) is the one in the token file's record, if it names one.

    Raises:
        DataError: the tokenizers differ.
    """
    recorded = None if record is None else record.tokenizer
    if recorded is not None and recorded != tokenizer:
        raise DataError(
            f"{prefix} was made with the tokenizer {describe_tokenizer(recorded)} (recorded in "
            f"{side_file_path(prefix)}), but this run uses {describe_tokenizer(tokenizer)}: give --tokenizer-type and "
            "--tokenizer-model as recorded, or preprocess the text again"
        )


def describe_tokenizer(identity: dict[str, Any]) -> str:
    """Return the identity as text for a person."""
    return ", ".join(f"{name} {shown(value)}" for name, value in identity.items())

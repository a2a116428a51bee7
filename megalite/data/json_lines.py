"""Corpora as JSON lines: one JSON object a line, its texts under keys."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megalite.errors import DataError

# Large enough that sending a chunk to another process costs little, small enough that all finish together.
CHUNK_BYTES = 1 << 18


class Chunk(NamedTuple):
    """Consecutive lines of one file, the first of which has the number `first_line`, from 1."""

    path: str
    first_line: int
    lines: list[bytes]


def read_chunks(inputs: Iterable[str]) -> Iterator[Chunk]:
    """The lines of the files (those that end in .gz decompressed), in order, in chunks of about `CHUNK_BYTES`.

    Raises:
        DataError: a file cannot be read.
    """
    for path in inputs:
        try:
            with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
                number = 1
                while lines := file.readlines(CHUNK_BYTES):
                    yield Chunk(path, number, lines)
                    number += len(lines)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"{path} cannot be read ({reason}): --input takes JSON lines, plain or as .gz") from error


def texts_of_chunk(chunk: Chunk, keys: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """The number of every line that is not blank, and its texts in the order of the keys.

    Raises:
        DataError: a line is not a JSON object with a text under every key.
    """
    for number, line in enumerate(chunk.lines, chunk.first_line):
        if line.strip():
            try:
                texts = _texts(line, keys)
            except (ValueError, RecursionError) as error:
                raise line_error(chunk.path, number, error) from error
            yield number, texts


def line_error(path: str, number: int, error: Exception) -> DataError:
    """What is wrong with a line, and where it is."""
    return DataError(f"{path}:{number}: {error}. Nothing was written: correct or remove the line")


def _texts(line: bytes, keys: Sequence[str]) -> list[str]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a JSON object ({error.msg}, column {error.colno})") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object")
    texts = []
    for key in keys:
        if key not in record:
            raise ValueError(f"no field {key!r} (--json-keys) among {', '.join(map(repr, record))}")
        if not isinstance(record[key], str):
            raise ValueError(f"the field {key!r} is a {type(record[key]).__name__}, not a text")
        # JSON can escape half of a surrogate pair, which is no character and which no tokenizer takes.
        record[key].encode()
        texts.append(record[key])
    return texts

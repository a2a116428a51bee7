"""Documents in a chunk of a corpus."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from megalite.data.corpus import Chunk, suffix
from megalite.errors import DataError

_GUESSED = "; files not named .txt (or .txt.gz, .txt.zst) or .parquet are read as JSON lines"


class Document(NamedTuple):
    """Texts of a record: a list of sequences per key, with one sequence unless the record has a list of texts."""

    number: int
    texts: list[list[str]]


class BadRecord(NamedTuple):
    """Record that is not a document, and the reason."""

    number: int
    place: str
    reason: str

    def error(self) -> DataError:
        """Return the error to raise if bad records are not skipped."""
        if self.reason.endswith(_GUESSED):
            return DataError(f"{self.place}: {self.reason}. Rename it to .txt if it is one text, else to .jsonl")
        return DataError(
            f"{self.place}: {self.reason}. Correct or remove it; megalite-preprocess --skip-bad-lines leaves such "
            "lines out"
        )


def read_documents(chunk: Chunk, keys: Sequence[str]) -> Iterator[Document | BadRecord]:
    """Yield the documents of a chunk in order, skipping blank lines. A text file gives the same text for every key."""
    for number, record in _records(chunk):
        try:
            yield Document(number, _texts(chunk, record, keys))
        except (ValueError, RecursionError) as error:
            yield BadRecord(number, chunk.place(number), str(error) + _kind_that_was_guessed(chunk))


def parse_record(line: bytes) -> dict[str, Any]:
    """Return the JSON object on a line.

    Raises:
        ValueError: the line is not a JSON object.
        RecursionError: it is nested too deep.
    """
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a JSON object ({error.msg}, column {error.colno})") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object")
    return record


def check_text(text: str) -> None:
    """Raise ValueError if a text has half of a surrogate pair, which JSON can contain but no tokenizer accepts."""
    text.encode()


def _records(chunk: Chunk) -> Iterable[tuple[int, Any]]:
    if chunk.kind == "rows":
        return enumerate(chunk.data.to_pylist(), chunk.first)
    if chunk.kind == "text":
        return [(1, chunk.data)] if chunk.data else []
    return ((number, line) for number, line in enumerate(chunk.data.split(b"\n"), chunk.first) if line.strip())


def _texts(chunk: Chunk, record: Any, keys: Sequence[str]) -> list[list[str]]:
    if chunk.kind == "text":
        return [[record.decode("utf-8-sig")]] * len(keys)
    fields = parse_record(record) if chunk.kind == "lines" else record
    return [_sequences(fields, key) for key in keys]


def _kind_that_was_guessed(chunk: Chunk) -> str:
    """Return a hint for the error message if a file is read as JSON lines although its suffix is neither .json nor
    .jsonl; otherwise an empty text."""
    said = chunk.kind != "lines" or suffix(chunk.path) in (".json", ".jsonl")
    return "" if said else _GUESSED


def _sequences(fields: dict[str, Any], key: str) -> list[str]:
    if key not in fields:
        raise ValueError(f"no field {key!r} (--json-keys) among {', '.join(map(repr, fields))}")
    value = fields[key]
    sequences = value if isinstance(value, list) else [value]
    for text in sequences:
        if not isinstance(text, str):
            raise ValueError(f"the field {key!r} is a {type(text).__name__}, not a text")
        check_text(text)
    return sequences

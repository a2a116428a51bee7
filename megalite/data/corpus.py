"""Reader of a corpus in chunks: JSON lines and text files, plain or compressed, and Parquet files."""

from __future__ import annotations

import glob
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from megalite.data.optional import optional_import
from megalite.data.side_file import SUFFIX as SIDE_FILE
from megalite.errors import DataError
from megalite.small_files import reason

# Large enough to make the cost of sending a chunk to another process small; small enough to balance the processes.
CHUNK_BYTES = 1 << 19
# Largest size in bytes of a text file or a line: it is one document, which is tokenized at once.
LARGEST_TEXT = 1 << 30
# Compressed bytes per read. 4 bytes of zstd decompress to at most 128 KiB, so these to at most 64 MiB; smaller reads
# would be slower.
ZSTD_PIECE = 1 << 11
COMPRESSIONS = (".gz", ".zst")
SUFFIXES = (".jsonl", ".json", ".txt", ".parquet")

Kind = Literal["lines", "text", "rows"]


class Position(NamedTuple):
    """Place between two records: in file number `file`, after `offset` uncompressed bytes, or rows of a table.

    The part of the file before this place has `records` lines or rows.
    """

    file: int = 0
    offset: int = 0
    records: int = 0


class Chunk(NamedTuple):
    """Consecutive records of one file.

    Attributes:
        path: the file.
        kind: "lines" of JSON, a complete "text" file, or "rows" of a table.
        first: number of the first line or row, from 1.
        data: bytes, or a `pyarrow.RecordBatch` of rows.
        end: place after the chunk.
        bytes_read: bytes of the file on disk (compressed) that were read up to the end of the chunk.
    """

    path: str
    kind: Kind
    first: int
    data: Any
    end: Position
    bytes_read: int

    def place(self, number: int) -> str:
        """Return the place of a record, given its number, for messages."""
        return {"lines": f"{self.path}:{number}", "text": self.path, "rows": f"{self.path}: row {number}"}[self.kind]


def find_inputs(
    patterns: Sequence[str], own: Iterable[Path] = (), note: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Return the files that paths, glob patterns and directories name, in the order given; sorted by path within each.

    A directory means all files below it that end in one of `SUFFIXES`, compressed or not, except hidden files and side
    files of token files. Links are followed. A file that is found several times, perhaps under several names, is read
    once.

    Args:
        patterns: values of --input.
        own: files and folders of this run's output, which are never input, even if they are in an input directory.
        note: function that is called with a message about each file that is left out.

    Raises:
        DataError: a pattern names no file, or a directory cannot be read.
    """
    outputs = {os.path.realpath(path) for path in own}
    found: dict[str, str] = {}
    again: list[str] = []
    for path in (path for pattern in patterns for path in _matches(pattern)):
        real = os.path.realpath(path)
        if real in outputs or os.path.dirname(real) in outputs:
            note(f"left out {path}: it is output of this command")
        elif real in found:
            again.append(path)
        else:
            found[real] = path
    if again:
        others = f" and {len(again) - 1:,} more" if again[1:] else ""
        note(f"given more than once, but read once: {again[0]}{others}")
    return list(found.values())


def _matches(pattern: str) -> list[str]:
    """Return the files that an --input means, sorted: one path, the texts below a directory, or a pattern's.

    Raises:
        DataError: there are none.
    """
    path = Path(pattern)
    if path.is_dir():
        found = [str(file) for file in sorted(_below(path)) if suffix(file.name) in SUFFIXES]
        wanted = f"has no file that ends in {', '.join(SUFFIXES)} (or these and {' or '.join(COMPRESSIONS)})"
    elif path.exists() or not glob.has_magic(pattern):
        return [pattern]
    else:
        found = [name for name in sorted(glob.glob(pattern, recursive=True)) if not Path(name).is_dir()]
        wanted = "matches no file"
    if not found:
        raise DataError(f"--input {pattern} {wanted}")
    return found


def _below(directory: Path) -> Iterator[Path]:
    """Yield the files below a directory that are neither hidden nor side files.

    Each folder is visited once, since links can lead to a folder twice or form a cycle.
    """

    def fail(error: OSError) -> None:
        raise DataError(f"--input {directory}: {error.filename} cannot be read ({error.strerror})") from error

    seen: set[str] = set()
    for folder, subfolders, names in os.walk(directory, onerror=fail, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (Path(folder, name) for name in names if not name.startswith(".") and not name.endswith(SIDE_FILE))


def suffix(name: str) -> str:
    """Return the suffix of the format, in lower case, without the suffix of a compression."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def read_chunks(inputs: Sequence[str], keys: Sequence[str], start: Position | None = None) -> Iterator[Chunk]:
    """Yield the records of the files in chunks, in order, from `start` on.

    Chunks of JSON lines and rows have about `CHUNK_BYTES`; a text file is one chunk. A file that ends in .txt is a
    text, a file that ends in .parquet a table; all others are JSON lines. .gz and .zst are decompressed.

    Raises:
        DataError: a file cannot be read.
    """
    start = start or Position()
    for number, path in enumerate(inputs[start.file :], start.file):
        begin = start if number == start.file else Position(number)
        try:
            if suffix(path) == ".parquet":
                yield from _rows(path, keys, begin)
            elif suffix(path) == ".txt":
                yield from _text(path, begin)
            else:
                yield from _lines(path, begin)
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise DataError(
                f"{path} cannot be read ({reason(error)}): supported are JSON lines, .txt (plain, .gz or .zst) and "
                ".parquet"
            ) from error


def _lines(path: str, begin: Position) -> Iterator[Chunk]:
    """Yield whole lines in chunks of a little more than CHUNK_BYTES, from `begin` on.

    Raises:
        DataError: a line is longer than LARGEST_TEXT bytes.
    """
    with open(path, "rb") as stored, _decompressed(path, stored) as file:
        _skip(file, begin.offset)
        while data := file.read(CHUNK_BYTES):
            data += (rest := file.readline(LARGEST_TEXT + 1))
            if len(rest) > LARGEST_TEXT:
                number = begin.records + 1 + data.count(b"\n", 0, -1)
                raise DataError(
                    f"{path}:{number}: a line of more than {LARGEST_TEXT >> 20} MiB: remove it, or cut its document "
                    "into several"
                )
            ends = data.count(b"\n") + (not data.endswith(b"\n"))
            end = Position(begin.file, begin.offset + len(data), begin.records + ends)
            yield Chunk(path, "lines", begin.records + 1, data, end, _tell(stored))
            begin = end


def _text(path: str, begin: Position) -> Iterator[Chunk]:
    if begin.records:
        return
    with open(path, "rb") as stored, _decompressed(path, stored) as file:
        data = file.read(LARGEST_TEXT + 1)
        if len(data) > LARGEST_TEXT:
            raise DataError(
                f"{path} is one document of more than {LARGEST_TEXT >> 20} MiB: write its documents as JSON lines, "
                '{"text": "..."}'
            )
        yield Chunk(path, "text", 1, data, Position(begin.file, len(data), 1), _tell(stored))


def _rows(path: str, keys: Sequence[str], begin: Position) -> Iterator[Chunk]:
    """Yield the columns `keys` of a Parquet file in chunks of about CHUNK_BYTES, from row `begin.records` on.

    Raises:
        DataError: there is no such column.
    """
    parquet = optional_import("pyarrow.parquet", "pyarrow", f"{path} is a Parquet file")
    with open(path, "rb") as stored, parquet.ParquetFile(stored) as table:
        missing = [key for key in keys if key not in table.schema_arrow.names]
        if missing:
            names = ", ".join(map(repr, table.schema_arrow.names))
            raise DataError(f"{path}: no column {missing[0]!r} (--json-keys) among {names}")
        size, rows_before = Path(path).stat().st_size, 0
        for group in range(table.num_row_groups):
            facts = table.metadata.row_group(group)
            skipped = max(begin.records - rows_before, 0)
            rows_before += facts.num_rows
            if skipped >= facts.num_rows:
                continue
            per_chunk = max(1, CHUNK_BYTES * facts.num_rows // max(facts.total_byte_size, 1))
            for batch in table.iter_batches(per_chunk, row_groups=[group], columns=list(keys)):
                batch, skipped = batch.slice(skipped), max(skipped - batch.num_rows, 0)
                if batch.num_rows:
                    row = begin.records + batch.num_rows
                    end = Position(begin.file, row, row)
                    yield Chunk(path, "rows", begin.records + 1, batch, end, size * row // table.metadata.num_rows)
                    begin = end


@contextmanager
def _decompressed(path: str, stored: IO[bytes]) -> Iterator[io.BufferedIOBase | IO[bytes]]:
    """Open the bytes inside a stored file, by its suffix. Bytes that are not zstd's are a ValueError."""
    if path.lower().endswith(".gz"):
        with gzip.open(stored, "rb") as file:
            yield file
    elif path.lower().endswith(".zst"):
        zstandard = optional_import("zstandard", "zstandard", f"{path} is compressed with zstd")
        try:
            yield io.BufferedReader(_ZstdStream(stored, zstandard), 1 << 17)
        except zstandard.ZstdError as error:
            raise ValueError(error) from error
    else:
        yield stored


class _ZstdStream(io.RawIOBase):
    """Stream of a zstd file that detects a truncated frame, which the library's own stream does not."""

    def __init__(self, file: IO[bytes], zstandard: Any) -> None:
        self._file = file
        # The largest possible window, 2^31 bytes, as written by zstd --long=31. The default limit is lower.
        self._frames = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = None
        self._compressed, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer from as many frames as the file has, and return the number of bytes, 0 at the end."""
        while not self._ready:
            self._compressed = self._compressed or self._file.read(ZSTD_PIECE)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            self._frame = self._frame or self._frames.decompressobj()
            self._ready = memoryview(self._frame.decompress(self._compressed))
            self._compressed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _skip(file: io.BufferedIOBase | IO[bytes], count: int) -> None:
    if count and file.seekable():
        file.seek(count)
        return
    while count:
        some = len(file.read(min(count, 1 << 20)))
        if not some:
            raise EOFError("it has become shorter")
        count -= some


def _tell(file: IO[bytes]) -> int:
    return file.tell() if file.seekable() else 0

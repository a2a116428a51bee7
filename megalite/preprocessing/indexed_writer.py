"""Writer of token files (format: `megalite/data/indexed_dataset.py`); its memory does not grow with the files."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megalite.atomic_files import TemporaryFile, remove_leftovers, sync_directory, temporary_path
from megalite.data.indexed_dataset import DTYPE_CODES, HEADER, MAGIC, VERSION, bin_path, idx_path
from megalite.data.side_file import CHUNK, Record, side_file_path, write_side_file
from megalite.errors import DataError, FileError

# Number of lengths or bytes that are read back at a time.
BLOCK = 1 << 20
LONGEST = np.iinfo(np.int32).max


class ChecksummedFile(TemporaryFile):
    """File with a checksum per `CHUNK` bytes, updated at each write; it includes data that an earlier process wrote.

    Attributes:
        crc32: the checksums; the last one covers the data up to the end of the file.
    """

    def __init__(self, path: Path, temporary: Path, size: int = 0) -> None:
        super().__init__(path, temporary, size)
        self.crc32: list[int] = []
        self._size = 0
        with self.temporary.open("rb") as file:
            while piece := file.read(BLOCK):
                self._add(piece)

    def write(self, data: bytes) -> None:
        super().write(data)
        self._add(data)

    def _add(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            inside = self._size % CHUNK
            part, rest = rest[: CHUNK - inside], rest[CHUNK - inside :]
            if inside == 0:
                self.crc32.append(0)
            self.crc32[-1] = zlib.crc32(part, self.crc32[-1])
            self._size += len(part)


class Extent(NamedTuple):
    """Size of a dataset."""

    tokens: int = 0
    sequences: int = 0
    documents: int = 0


class IndexedDatasetWriter:
    """Writer of a token file. The final names appear only at `finish`, when the files are complete and synced to disk.

    This is a context manager: if it exits with an exception or without `finish`, it removes the written data. Earlier
    files with the final names then stay unchanged.

    Args:
        prefix: path of the .bin and .idx to write, without the suffix. Missing folders are created.
        dtype: type of the stored tokens, one of `DTYPES`.
        tokenizer: identity of the tokenizer (`Tokenizer.identity()`), recorded in the side file.
        folder: folder of the growing files, on the same file system as `prefix`; they stay there if the writer exits
            without `finish`. None: a temporary folder next to the final names, always removed.
        extent: size of the part of an earlier writer's files in `folder` to continue from.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: Any,
        tokenizer: dict[str, Any] | None = None,
        folder: Path | None = None,
        extent: Extent | None = None,
    ) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.tokenizer = tokenizer
        if self.dtype not in DTYPE_CODES:
            known = ", ".join(map(str, DTYPE_CODES))
            raise DataError(f"tokens cannot be stored as {np.dtype(dtype)}: use one of {known}")
        self.extent = extent or Extent()
        self._kept = folder is not None
        self._folder = folder or temporary_path(Path(prefix))
        if not self._kept:
            remove_leftovers(Path(prefix))
        tokens, sequences, documents = self.extent
        final, (bin, lengths, ends) = bin_path(prefix), growing_files(prefix, self._folder)
        self._bin = ChecksummedFile(final, bin, tokens * self.dtype.itemsize)
        self._lengths = TemporaryFile(final, lengths, sequences * 4)
        self._documents = TemporaryFile(final, ends, documents * 8)
        self._files = (self._bin, self._lengths, self._documents)

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray, sequences: np.ndarray) -> int:
        """Add many documents.

        Args:
            tokens: tokens of all documents, concatenated.
            lengths: number of tokens of each sequence.
            sequences: number of sequences of each document.

        Returns:
            The CRC-32 of the written data.

        Raises:
            DataError: a token does not fit the stored type, or the lengths do not sum to the number of tokens.
        """
        if lengths.sum() != len(tokens):
            raise DataError(f"the lengths of the sequences sum to {lengths.sum()}, but there are {len(tokens)} tokens")
        if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= LONGEST:
            raise DataError(
                f"sequences have from {lengths.min()} to {lengths.max()} tokens: 0 to {LONGEST} can be stored"
            )
        ends = self.extent.sequences + np.cumsum(sequences, dtype=np.int64)
        checksum = 0
        added = (self._stored(tokens), lengths.astype("<i4", copy=False), ends.astype("<i8", copy=False))
        for file, array in zip(self._files, added, strict=True):
            data = array.tobytes()
            file.write(data)
            checksum = zlib.crc32(data, checksum)
        self.extent = Extent(*(before + len(array) for before, array in zip(self.extent, added, strict=True)))
        return checksum

    def _stored(self, tokens: np.ndarray) -> np.ndarray:
        if tokens.dtype == self.dtype:
            return tokens
        stored = tokens.astype(self.dtype)
        if not np.array_equal(stored, tokens):
            raise DataError(
                f"tokens from {tokens.min()} to {tokens.max()} do not fit {self.dtype.name}, the type of "
                f"{self.prefix}: the tokenizer gives tokens beyond its own vocabulary size"
            )
        return stored

    def flush(self) -> None:
        """Pass all data to the operating system: a later kill of the process does not lose it."""
        for file in self._files:
            file.flush()

    def finish(self) -> None:
        """Write the index and the side file, sync them, and give all three their final names."""
        self.complete()
        publish(self.prefix, self._folder)

    def complete(self) -> None:
        """Write the index and the side file next to the growing tokens, and sync all; only `publish` remains then."""
        self.flush()
        idx, record = idx_path(self.prefix), side_file_path(self.prefix)
        with (
            closing(ChecksummedFile(idx, self._folder / idx.name)) as index,
            closing(TemporaryFile(record, self._folder / record.name)) as side,
        ):
            self._write_index(index)
            crc32 = {"bin": self._bin.crc32, "idx": index.crc32}
            write_side_file(side, Record(self.tokenizer, self.extent.tokens, self.extent.documents, crc32))
            for file in (self._bin, index, side):
                file.sync()

    def _write_index(self, file: TemporaryFile) -> None:
        """Write the .idx in its format, from the lengths and document ends that were added."""
        _, sequences, documents = self.extent
        file.write(HEADER.pack(MAGIC, VERSION, DTYPE_CODES[self.dtype], sequences, documents + 1))
        for lengths in read_blocks(self._lengths.temporary, "<i4"):
            file.write(lengths.tobytes())
        position = 0
        for lengths in read_blocks(self._lengths.temporary, "<i4"):
            ends = position + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            file.write((ends - lengths.astype(np.int64) * self.dtype.itemsize).astype("<i8").tobytes())
            position = int(ends[-1])
        file.write(bytes(8))
        for ends in read_blocks(self._documents.temporary, "<i8"):
            file.write(ends.tobytes())

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.close()
        if not self._kept:
            shutil.rmtree(self._folder, ignore_errors=True)


def growing_files(prefix: str | Path, folder: Path) -> tuple[Path, Path, Path]:
    """Return the paths of a writer's unfinished files in `folder`: tokens, sequence lengths and document ends."""
    name = Path(prefix).name
    return folder / f"{name}.bin", folder / f"{name}.lengths", folder / f"{name}.documents"


def remove_unfinished(prefix: str | Path, folder: Path) -> None:
    """Remove the files that a writer created in `folder` for a prefix, and no other files."""
    finished = (folder / path.name for path in (idx_path(prefix), side_file_path(prefix)))
    for path in (*growing_files(prefix, folder), *finished):
        path.unlink(missing_ok=True)


def publish(prefix: str | Path, folder: Path) -> None:
    """Give their final names to the files that `IndexedDatasetWriter.complete` left in `folder`.

    After a kill during this function, another call completes it.

    Raises:
        FileError: a file cannot be moved.
    """
    index = idx_path(prefix)
    try:
        # A reader needs the .idx. The old one is removed first and the new one is moved last, so that a reader never
        # sees an index of other tokens.
        if (folder / index.name).exists():
            index.unlink(missing_ok=True)
        for path in (bin_path(prefix), side_file_path(prefix), index):
            if (folder / path.name).exists():
                os.replace(folder / path.name, path)
        sync_directory(index.parent)
    except OSError as error:
        raise FileError(f"{prefix} cannot get its final name ({error.strerror}): is the folder writable?") from error


def read_blocks(path: Path, dtype: str) -> Iterator[np.ndarray]:
    """Yield the numbers in a writer's unfinished file, in blocks."""
    with path.open("rb") as file:
        while len(block := np.fromfile(file, dtype, BLOCK)):
            yield block

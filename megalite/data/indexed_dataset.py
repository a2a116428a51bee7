"""Token files in Megatron-LM's format: `{prefix}.bin` has the tokens, `{prefix}.idx` the place of each sequence in it.

All integers are little-endian. The .idx consists of these fields, without padding:

    bytes        field
    9            magic "MMIDIDX\\0\\0"
    8            u64 version, 1
    1            u8 code of the token type (`DTYPES`)
    8            u64 number of sequences n
    8            u64 number of document boundaries, the number of documents plus one
    4 n          int32 tokens in each sequence
    8 n          int64 byte offset of each sequence in the .bin
    8 (d + 1)    int64 index of the first sequence of each document, and n at the end

A document without tokens has a boundary but no sequence.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from megalite.data.mapped_file import map_file, refuse_too_many_open_files
from megalite.errors import DataError
from megalite.small_files import open_regular, reason

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
BLOCK = 1 << 16
"""Entries of the index that are checked together: few enough to fit into a processor's cache."""


def bin_path(prefix: str | Path) -> Path:
    """Return the path of the file with the tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of the file with the index."""
    return Path(f"{prefix}.idx")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type that Megatron-LM stores tokens in, for a vocabulary of this size."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedDataset:
    """Sequences of tokens in a pair of .bin and .idx files.

    Args:
        prefix: path of the .bin and .idx without the suffix.
        mmap: map the .bin into memory; otherwise each `get` is one positioned read, for file systems on which mapping
            is slow.
        check: check each entry of the index; otherwise the caller must call `check_index`.

    Raises:
        DataError: a file is missing or damaged, or the two files do not belong together.
    """

    def __init__(self, prefix: str | Path, mmap: bool = True, check: bool = True) -> None:
        self.prefix = str(prefix)
        index = _map_file(idx_path(prefix))
        self.dtype, sequences, boundaries = _read_header(idx_path(prefix), index)
        offset = HEADER.size
        self.sequence_lengths = np.frombuffer(index, np.int32, sequences, offset)
        offset += self.sequence_lengths.nbytes
        self.sequence_pointers = np.frombuffer(index, np.int64, sequences, offset)
        offset += self.sequence_pointers.nbytes
        self.document_indices = np.frombuffer(index, np.int64, boundaries, offset)
        if sequences and self.sequence_lengths.min() < 0:
            _damaged(idx_path(prefix), "sequence lengths of 0 or more", str(self.sequence_lengths.min()))
        # Summed in parts, none of which can overflow 64 bits: the total is compared with the size of the .bin.
        parts = (self.sequence_lengths[start : start + BLOCK] for start in range(0, sequences, BLOCK))
        self.tokens = sum(int(part.sum(dtype=np.int64)) for part in parts)
        if check:
            self.check_index()
        self._read = self._open_tokens(mmap)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sequence_lengths)

    def get(self, index: int) -> np.ndarray:
        """Return the tokens of one sequence, read-only, in the type they are stored in.

        Raises:
            IndexError: there is no such sequence.
        """
        return self._read(int(self.sequence_pointers[index]), int(self.sequence_lengths[index]))

    def document(self, document: int) -> list[np.ndarray]:
        """Return the sequences of a document. Most documents have one."""
        first, last = self.document_indices[document : document + 2].tolist()
        return [self.get(sequence) for sequence in range(first, last)]

    def join(self, sequences: list[int], start: int, end: int) -> np.ndarray:
        """Return consecutive sequences, concatenated, from token `start` of the first up to (not including) token `end`
        of the last, int64.

        Raises:
            DataError: a sequence is outside the .bin.
        """
        lengths, pointers, size = self.sequence_lengths.item, self.sequence_pointers.item, self.dtype.itemsize
        try:
            ends = [*map(lengths, sequences[:-1]), end]
            parts = [self._read(pointers(sequences[0]) + start * size, ends[0] - start)]
            others = zip(sequences[1:], ends[1:], strict=True)
            parts += [self._read(pointers(sequence), end) for sequence, end in others]
        except (LookupError, ValueError, OSError) as error:
            _damaged(idx_path(self.prefix), f"sequences {sequences} inside the .bin", str(error))
        return np.concatenate(parts, dtype=np.int64)

    def all_tokens(self) -> np.ndarray:
        """Return all tokens of the .bin, memory-mapped."""
        return _map_file(bin_path(self.prefix)).view(self.dtype)

    @cached_property
    def lengths_sha256(self) -> str:
        """Return a hash of the sequences' lengths. This takes a second for about 200 million sequences."""
        return hashlib.sha256(self.sequence_lengths.data).hexdigest()

    def check_index(self, advance: Callable[[int], None] = lambda size: None) -> None:
        """Check every pointer against the lengths before it, and every document boundary against the one before it.

        This takes a few milliseconds for a million of each. `advance` is called with the number of bytes after each
        block.

        Raises:
            DataError: sequences do not follow one another, or documents go backwards.
        """
        self._check_pointers(advance)
        self._check_boundaries(advance)

    def _check_pointers(self, advance: Callable[[int], None]) -> None:
        """Refuse an index in which a sequence does not begin, in bytes, where the one before ends."""
        begin = 0
        for first in range(0, len(self), BLOCK):
            pointers = self.sequence_pointers[first : first + BLOCK]
            sizes = self.sequence_lengths[first : first + BLOCK].astype(np.int64) * self.dtype.itemsize
            ends = begin + np.cumsum(sizes)
            wrong = np.flatnonzero(pointers != ends - sizes)
            if len(wrong):
                at = int(wrong[0])
                expected = f"sequence {first + at} at byte {(ends - sizes)[at]}, the end of those before"
                _damaged(idx_path(self.prefix), expected, f"it at byte {pointers[at]}")
            begin = int(ends[-1])
            advance(pointers.nbytes)

    def _check_boundaries(self, advance: Callable[[int], None]) -> None:
        """Refuse documents that are not all the sequences in order. `advance` takes the bytes that were read."""
        path, boundaries = idx_path(self.prefix), self.document_indices
        if (boundaries[0], boundaries[-1]) != (0, len(self)):
            expected = f"document boundaries from 0 to {len(self)}, the number of sequences"
            _damaged(path, expected, f"{boundaries[0]} to {boundaries[-1]}")
        for first in range(0, len(boundaries) - 1, BLOCK):
            block = boundaries[first : first + BLOCK + 1]
            backwards = block[1:] < block[:-1]  # compared, not subtracted: a difference could overflow 64 bits
            if backwards.any():
                at = int(np.argmax(backwards))
                expected = f"document {first + at}, which begins at sequence {block[at]}, to end there or later"
                _damaged(path, expected, f"its end at {block[at + 1]}")
            advance(block.nbytes)

    def _open_tokens(self, mmap: bool) -> Callable[[int, int], np.ndarray]:
        """Return the function that reads tokens, given a position in bytes and a count."""
        path, dtype, expected = bin_path(self.prefix), self.dtype, self.tokens * self.dtype.itemsize
        try:
            size = path.stat().st_size
        except OSError as error:
            _unreadable(path, error)
        if size != expected:
            found = f"{size} bytes"
            _damaged(path, f"{expected} bytes ({self.tokens} tokens of {dtype.itemsize} bytes, from the .idx)", found)
        if mmap:
            data = _map_file(path)
            return lambda position, count: np.frombuffer(data, dtype, count, position)
        try:
            file = open_regular(path)
        except (OSError, ValueError) as error:
            _unreadable(path, error)
        return lambda position, count: np.frombuffer(_read_at(file.fileno(), position, count, dtype), dtype, count)


def _read_at(descriptor: int, position: int, count: int, dtype: np.dtype[Any]) -> bytes:
    """Read `count` tokens as bytes, in several system calls, since each returns at most 2 GB."""
    left, parts = count * dtype.itemsize, list[bytes]()
    while left and (part := os.pread(descriptor, left, position)):
        parts.append(part)
        left, position = left - len(part), position + len(part)
    return b"".join(parts)


def _read_header(path: Path, index: np.ndarray) -> tuple[np.dtype[Any], int, int]:
    """Return the dtype and the numbers of sequences and document boundaries; another size is a DataError."""
    if len(index) < HEADER.size:
        _damaged(path, f"a header of {HEADER.size} bytes", f"{len(index)} bytes")
    magic, version, code, sequences, boundaries = HEADER.unpack_from(index.data)
    if magic != MAGIC:
        _damaged(path, f"the magic bytes {MAGIC!r}", f"{magic!r}")
    if version != VERSION:
        _damaged(path, f"version {VERSION}", f"version {version}")
    if code not in DTYPES:
        _damaged(path, f"a token type code from 1 to {len(DTYPES)}", f"{code}")
    if DTYPES[code].kind == "f":
        _damaged(path, "integer tokens", f"type code {code}, {DTYPES[code].name}")
    if boundaries < 1:
        _damaged(path, "at least one document boundary", f"{boundaries}")
    size = HEADER.size + 12 * sequences + 8 * boundaries
    if len(index) == size + sequences and sequences:
        _damaged(path, "a text dataset", "a multimodal one (a mode byte per sequence), which megalite does not read")
    if len(index) != size:
        expected = f"{size} bytes for {sequences} sequences and {boundaries} document boundaries"
        _damaged(path, expected, f"{len(index)} bytes")
    return DTYPES[code], sequences, boundaries


def _damaged(path: Path, expected: str, found: str) -> NoReturn:
    raise DataError(
        f"{path} is damaged or was not written as a Megatron token file: expected {expected}, found {found}. "
        "Copy the .bin and .idx again from where they came, or run megalite-preprocess again."
    )


def _unreadable(path: Path, error: OSError | ValueError) -> NoReturn:
    """Raise DataError for a file that cannot be opened; the message says if a path was given in place of a prefix."""
    refuse_too_many_open_files(error)
    what = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({reason(error)})"
    prefix, given = path.with_suffix(""), path.with_suffix("").suffix
    if given in (".bin", ".idx"):
        raise DataError(f"{path} {what}: leave out {given}, and give {prefix.with_suffix('')}") from error
    if given and prefix.is_file():
        raise DataError(f"{path} {what}: {prefix} is no token file; megalite-preprocess makes some of texts") from error
    raise DataError(
        f"{path} {what}. A data path is the common prefix of a .bin and a .idx file, without the suffix, "
        "as megalite-preprocess prints it."
    ) from error


def _map_file(path: Path) -> np.ndarray:
    """Map a file read-only and return its bytes, uint8 [size]."""
    try:
        return map_file(path)
    except (OSError, ValueError) as error:
        _unreadable(path, error)

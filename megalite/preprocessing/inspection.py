"""Inspection of token files: their contents, and whether every byte is where the index says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megalite.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megalite.data.side_file import describe_tokenizer, read_side_file, recorded_tokenizer
from megalite.data.verification import check_record
from megalite.errors import DataError
from megalite.preprocessing.length_statistics import length_statistics

# Entries of the index, and tokens, that are looked at a time.
BLOCK = 1 << 22


def describe(data: IndexedDataset) -> dict[str, str]:
    """Return a description of a dataset, by name."""
    documents = len(data.document_indices) - 1
    lengths = length_statistics(data.sequence_lengths[first:last] for first, last in _blocks(len(data)))
    tokenizer = recorded_tokenizer(data.prefix)
    return {
        "prefix": data.prefix,
        "stored as": data.dtype.name,
        "documents": f"{documents:,}",
        "sequences": f"{len(data):,}",
        "tokens": f"{data.tokens:,}",
        "bytes": f"{bin_path(data.prefix).stat().st_size:,} and {idx_path(data.prefix).stat().st_size:,} of index",
        "lengths": str(lengths),
        "empty documents": f"{_empty_documents(data):,}",
        "tokenizer": "not recorded" if tokenizer is None else describe_tokenizer(tokenizer),
    }


def document_tokens(data: IndexedDataset, document: int) -> list[np.ndarray]:
    """Return the sequences of a document. Raises DataError if there is no such document."""
    documents = len(data.document_indices) - 1
    if not 0 <= document < documents:
        raise DataError(f"--document {document}: {data.prefix} has documents 0 to {documents - 1}")
    first, last = data.document_indices[document : document + 2].tolist()
    return [data.get(sequence) for sequence in range(first, last)]


def verify(data: IndexedDataset) -> None:
    """Compare a dataset, whose index was checked when it was opened, with its checksums, and check every token.

    Raises:
        DataError: a checksum differs from the recorded one, or a token is outside the recorded tokenizer's vocabulary.
    """
    record = read_side_file(data.prefix)
    check_record(data, record)
    vocab_size = None if record is None or record.tokenizer is None else record.tokenizer.get("vocab_size")
    tokens = data.all_tokens()
    for first, last in _blocks(data.tokens):
        block = tokens[first:last]
        largest, smallest = int(block.max()), int(block.min())
        if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
            at = int(np.flatnonzero((block < 0) | (block >= (vocab_size or largest + 1)))[0])
            raise DataError(
                f"{bin_path(data.prefix)}: token number {first + at} is {block[at]}, which is none of the "
                f"{vocab_size or ''} tokens of the vocabulary: the file is damaged, copy or preprocess it again"
            )


def _empty_documents(data: IndexedDataset) -> int:
    boundaries = data.document_indices
    blocks = _blocks(len(boundaries) - 1)
    return sum(int(np.count_nonzero(np.diff(boundaries[first : last + 1]) == 0)) for first, last in blocks)


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + BLOCK, count)) for first in range(0, count, BLOCK))

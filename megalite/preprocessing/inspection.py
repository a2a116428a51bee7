"""Inspection of token files: description of their contents, and check for damage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from megalite.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megalite.data.side_file import describe_tokenizer, read_side_file, recorded_tokenizer
from megalite.data.verification import check_record
from megalite.errors import DataError

# Number of index entries or tokens that are read at a time.
BLOCK = 1 << 22
# Lengths of this and above are counted together: a quantile among them is reported as this length.
LONGEST_COUNTED = 1 << 20


class LengthStatistics(NamedTuple):
    """Statistics of the number of tokens per sequence; all 0 if there are no sequences."""

    sequences: int = 0
    mean: float = 0.0
    shortest: int = 0
    median: int = 0
    percentile_99: int = 0
    longest: int = 0

    def __str__(self) -> str:
        """Return the statistics as text for a person."""
        return (
            f"{self.shortest:,} to {self.longest:,} tokens, mean {self.mean:,.1f}, median {self.median:,}, "
            f"99 % at most {self.percentile_99:,}"
        )


def length_statistics(blocks: Iterable[np.ndarray]) -> LengthStatistics:
    """Return statistics of the lengths in several blocks; the memory does not grow with the number of lengths."""
    counts = np.zeros(1, np.int64)
    total = longest = 0
    for lengths in blocks:
        fewer, counts = sorted((counts, np.bincount(np.minimum(lengths, LONGEST_COUNTED))), key=len)
        counts[: len(fewer)] += fewer
        total += int(lengths.sum(dtype=np.int64))
        longest = max(longest, int(lengths.max(initial=0)))
    below = np.cumsum(counts)
    sequences = int(below[-1])
    if not sequences:
        return LengthStatistics()
    # Ranks, from 1 in order of length, of the shortest, the median and the 99th percentile.
    ranks = (1, (sequences + 1) // 2, -(-sequences * 99 // 100))
    shortest, median, percentile_99 = np.searchsorted(below, ranks).tolist()
    return LengthStatistics(sequences, total / sequences, shortest, median, percentile_99, longest)


def describe(data: IndexedDataset) -> dict[str, str]:
    """Return the facts about a dataset, as texts by name."""
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
        "empty documents": f"{int(np.count_nonzero(data.document_indices[1:] == data.document_indices[:-1])):,}",
        "tokenizer": "not recorded" if tokenizer is None else describe_tokenizer(tokenizer),
    }


def document_tokens(data: IndexedDataset, document: int) -> list[np.ndarray]:
    """Return the sequences of a document. Raises DataError if there is no such document."""
    documents = len(data.document_indices) - 1
    if not 0 <= document < documents:
        raise DataError(f"--document {document}: {data.prefix} has documents 0 to {documents - 1}")
    return data.document(document)


def verify(data: IndexedDataset) -> None:
    """Compare a dataset with its recorded checksums, and check every token. The index was checked when it was opened.

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
                f"{bin_path(data.prefix)}: token number {first + at} is {block[at]}, which is not one of the "
                f"{vocab_size or ''} tokens of the vocabulary: the file is damaged, copy or preprocess it again"
            )


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + BLOCK, count)) for first in range(0, count, BLOCK))

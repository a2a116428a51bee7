"""Merging of several token files into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megalite.data.side_file import describe_tokenizer, recorded_tokenizer
from megalite.errors import DataError
from megalite.preprocessing.indexed_writer import Extent, IndexedDatasetWriter
from megalite.preprocessing.inspection import verify
from megalite.process.host import raise_open_file_limit

# Largest number of tokens that are copied at a time, unless a single document has more.
BLOCK = 1 << 24


def find_prefixes(inputs: Sequence[str]) -> list[str]:
    """Return the given prefixes, with each directory replaced by the sorted prefixes in it.

    Raises:
        DataError: a directory has no token files, or only one file of a pair.
    """
    return [prefix for path in inputs for prefix in (_list_prefixes(Path(path)) if Path(path).is_dir() else [path])]


def _list_prefixes(folder: Path) -> list[str]:
    names = {path.with_suffix("") for path in folder.iterdir() if path.suffix in (".bin", ".idx") and path.is_file()}
    if not names:
        raise DataError(f"--input {folder} has no .bin and .idx files")
    for name in names:
        for path in (bin_path(name), idx_path(name)):
            if not path.exists():
                raise DataError(f"{path} is missing, but the other file of the pair exists: add it, or move that away")
    return sorted(map(str, names))


def merge(prefixes: Sequence[str], output_prefix: str) -> Extent:
    """Write the documents of several datasets, in this order, into one. The output appears only when it is complete.

    Returns:
        The size of the output.

    Raises:
        DataError: datasets are damaged, have different tokenizers or token types, or one of them is the output.
        FileError: the output cannot be written.
    """
    raise_open_file_limit()
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    if Path(output_prefix).resolve() in (Path(prefix).resolve() for prefix in prefixes):
        raise DataError(f"--output-prefix {output_prefix} is one of the inputs")
    for data in datasets:
        if data.dtype != datasets[0].dtype:
            raise DataError(
                f"{data.prefix} has tokens as {data.dtype.name} and {prefixes[0]} as {datasets[0].dtype.name}: "
                "preprocess both with one tokenizer"
            )
        verify(data)
    with IndexedDatasetWriter(output_prefix, datasets[0].dtype, _common_tokenizer(prefixes)) as writer:
        for data in datasets:
            for block in _document_blocks(data):
                writer.add_documents(*block)
        writer.finish()
    return writer.extent


def _common_tokenizer(prefixes: Sequence[str]) -> dict[str, Any] | None:
    """Return the tokenizer that is recorded with all datasets; None if a dataset has no recorded tokenizer.

    Raises:
        DataError: the recorded tokenizers differ.
    """
    recorded = [recorded_tokenizer(prefix) for prefix in prefixes]
    known = [(prefix, tokenizer) for prefix, tokenizer in zip(prefixes, recorded, strict=True) if tokenizer is not None]
    for prefix, tokenizer in known:
        if tokenizer != known[0][1]:
            raise DataError(
                f"{prefix} was made with the tokenizer {describe_tokenizer(tokenizer)}, {known[0][0]} with "
                f"{describe_tokenizer(known[0][1])}: preprocess both with one tokenizer"
            )
    return recorded[0] if len(known) == len(recorded) else None


def _document_blocks(data: IndexedDataset) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the tokens, the sequence lengths and the number of sequences per document, for some documents at a time."""
    tokens = data.all_tokens()
    starts = np.append(data.sequence_pointers // data.dtype.itemsize, data.tokens)
    begins = starts[data.document_indices]
    first, documents = 0, len(begins) - 1
    while first < documents:
        last = max(first + 1, int(np.searchsorted(begins, begins[first] + BLOCK, side="right")) - 1)
        from_sequence, to_sequence = data.document_indices[[first, last]].tolist()
        lengths = data.sequence_lengths[from_sequence:to_sequence]
        sequences = np.diff(data.document_indices[first : last + 1])
        yield tokens[begins[first] : begins[last]], lengths, sequences
        first = last

"""Conversion of a chunk of a corpus to tokens, which is the work of a preprocessing worker process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from megalite.config.tokenizer import EncodingFlags
from megalite.data.corpus import Chunk, Position
from megalite.data.documents import BadRecord, Document, read_documents
from megalite.data.indexed_dataset import token_dtype
from megalite.data.tokenizers import Tokenizer, build_tokenizer
from megalite.data.tokenizers.interface import Ids
from megalite.errors import DataError


def open_tokenizer(flags: EncodingFlags) -> Tokenizer:
    """Return the tokenizer that the flags name."""
    return build_tokenizer(
        flags,
        flags.vocab_size,
        include_special_tokens=flags.tokenizer_hf_include_special_tokens,
        fast_encoding=flags.fast_encoding,
    )


class Tokens(NamedTuple):
    """Documents of one key: their tokens, concatenated, the length of each sequence, and the number of sequences of
    each document."""

    tokens: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray


class EncodedChunk(NamedTuple):
    """Documents of a chunk.

    Attributes:
        keys: tokens of each key.
        text_bytes: size of the texts of all keys in UTF-8.
        bad: records left out.
        end, bytes_read: see `Chunk`.
    """

    keys: list[Tokens]
    text_bytes: int
    bad: list[BadRecord]
    end: Position
    bytes_read: int


def encode_chunk(flags: EncodingFlags, chunk: Chunk) -> EncodedChunk:
    """Return the tokens of a chunk's documents.

    Raises:
        DataError: a record is not a document, or its text cannot be tokenized, and `skip_bad_lines` is off.
    """
    tokenizer = cached_tokenizer(flags)
    records = list(read_documents(chunk, flags.json_keys))
    documents = [record for record in records if isinstance(record, Document)]
    bad = [record for record in records if isinstance(record, BadRecord)]
    keys = range(len(flags.json_keys))
    try:
        encoded = [_encode(tokenizer, documents, key) for key in keys]
    except ValueError:
        refused = {document.number: reason for document in documents if (reason := _refusal(tokenizer, document))}
        bad = sorted([*bad, *(BadRecord(number, chunk.place(number), reason) for number, reason in refused.items())])
        documents = [document for document in documents if document.number not in refused]
        encoded = [_encode(tokenizer, documents, key) for key in keys]
    if bad and not flags.skip_bad_lines:
        raise bad[0].error()
    tokens = [
        _assemble(*each, [len(document.texts[key]) for document in documents], tokenizer, flags.append_eod)
        for key, each in enumerate(encoded)
    ]
    text_bytes = sum(len(text.encode()) for document in documents for texts in document.texts for text in texts)
    return EncodedChunk(tokens, text_bytes, bad, chunk.end, chunk.bytes_read)


@lru_cache(maxsize=1)
def cached_tokenizer(flags: EncodingFlags) -> Tokenizer:
    """Return the tokenizer of this process, ready to encode."""
    # Some tokenizers build their fast encoder at the first call.
    tokenizer = open_tokenizer(flags)
    tokenizer.encode_documents([])
    return tokenizer


def _encode(tokenizer: Tokenizer, documents: Sequence[Document], key: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of all texts of a key, concatenated, and the number of tokens of each text.

    Raises:
        ValueError: a text cannot be encoded, or has tokens outside the tokenizer's vocabulary.
    """
    ids = tokenizer.encode_documents([text for document in documents for text in document.texts[key]])
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    tokens = _joined(ids, int(lengths.sum()))
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < tokenizer.vocab_size:
        raise ValueError(
            f"has tokens from {tokens.min()} to {tokens.max()}, but the tokenizer says that it has "
            f"{tokenizer.vocab_size}: its file is damaged"
        )
    return tokens, lengths


def _refusal(tokenizer: Tokenizer, document: Document) -> str | None:
    try:
        for key in range(len(document.texts)):
            _encode(tokenizer, [document], key)
    except ValueError as error:
        return str(error)
    return None


def _assemble(
    tokens: np.ndarray, lengths: np.ndarray, texts: Sequence[int], tokenizer: Tokenizer, append_eod: bool
) -> Tokens:
    """Combine the tokens of all texts, given the number of texts of each document, into tokens as they are stored."""
    document = np.repeat(np.arange(len(texts)), texts)[lengths > 0]
    sequences, lengths = np.bincount(document, minlength=len(texts)), lengths[lengths > 0]
    if append_eod:
        if not 0 <= tokenizer.eod < tokenizer.vocab_size:
            raise DataError(
                f"a document would end with token {tokenizer.eod}, but the tokenizer says that it has "
                f"{tokenizer.vocab_size}: its file is damaged"
            )
        last = np.cumsum(sequences)[sequences > 0] - 1
        tokens = np.insert(tokens, np.cumsum(lengths)[last], tokenizer.eod)
        lengths[last] += 1
    dtype = token_dtype(tokenizer.vocab_size)
    return Tokens(tokens.astype(dtype, copy=False), lengths.astype(np.int32), sequences.astype(np.int32))


def _joined(ids: Sequence[Ids], count: int) -> np.ndarray:
    if ids and all(isinstance(part, np.ndarray) for part in ids):
        return np.concatenate([np.asarray(part, np.int64) for part in ids])
    flat: Any = chain.from_iterable(ids)
    try:
        return np.fromiter(flat, np.int64, count)
    except OverflowError as error:
        raise ValueError("has tokens beyond 64 bits: the tokenizer's file is damaged") from error

"""Documents for evaluating a model, from token files or from texts, without begin- and end-of-document tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megalite.data.blend import normalize, parse_blend
from megalite.data.corpus import read_chunks
from megalite.data.documents import BadRecord, read_documents
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.side_file import check_tokenizer, read_side_file
from megalite.data.tokenizers import Tokenizer
from megalite.data.tokenizers.interface import beginning_of_documents
from megalite.data.tokenizers.null import NullTokenizer
from megalite.data.verification import check_record
from megalite.errors import DataError


@dataclass(frozen=True)
class Documents:
    """Data set for evaluation.

    Attributes:
        name: prefix of the token file, or name of the text file.
        tokens: tokens of each document [tokens], with any integer dtype.
        text_bytes: size of the text as UTF-8; None if it is unknown.
        weight: share of the data set in a blend; None if no weights are given.
        why_no_bytes: reason why `text_bytes` is unknown.
    """

    name: str
    tokens: list[np.ndarray]
    text_bytes: int | None = None
    weight: float | None = None
    why_no_bytes: str | None = None

    @property
    def count(self) -> int:
        """Number of tokens in all documents."""
        return sum(map(len, self.tokens))


def context_of_documents(tokenizer: Tokenizer) -> list[int]:
    """Return the context from which the first token of a document is predicted.

    This is the tokens that the tokenizer's template puts before a document. If there are none, it is the token that
    ends the previous document, as in training.
    """
    return beginning_of_documents(tokenizer) or [tokenizer.eod]


def read_token_files(
    data_path: Sequence[str], tokenizer: Tokenizer, limit: float | None = None, verify: bool = True
) -> list[Documents]:
    """Return the documents of each prefix in a `--data-path`, with their weights in the blend, if it has any.

    Args:
        limit: number of documents per prefix or, if it is below 1, the share of them.
        verify: verify the checksums of the files, if all documents are used. One process per node is enough.

    Raises:
        DataError: files are missing, damaged, made with another tokenizer, or without tokens.
    """
    prefixes, weights = parse_blend(data_path)
    shares = [None] * len(prefixes) if weights is None else normalize(weights)
    context = context_of_documents(tokenizer)
    found = []
    for prefix, share in zip(prefixes, shares, strict=True):
        record = read_side_file(prefix)
        check_tokenizer(prefix, record, tokenizer.identity())
        data = IndexedDataset(prefix)
        if verify and limit is None:
            check_record(data, record)
        count = limited(len(data.document_indices) - 1, limit)
        sequences = [_bare(data.document(document), context, tokenizer.eod) for document in range(count)]
        tokens = [np.concatenate([np.empty(0, data.dtype), *document]) for document in sequences]
        _check_tokens(prefix, tokens, tokenizer)
        text_bytes, why_no_bytes = _text_bytes(sequences, tokenizer)
        found.append(Documents(prefix, tokens, text_bytes, share, why_no_bytes))
    return found


def read_texts(
    files: Sequence[str], json_keys: Sequence[str], tokenizer: Tokenizer, limit: float | None = None
) -> list[Documents]:
    """Return the documents of each file, in any format that `megalite-preprocess` reads: one per JSON key of a record.

    `limit` is as in `read_token_files`. Raises DataError if a file cannot be read, a record is not a document, or there
    are no tokens.
    """
    found = []
    for file in files:
        documents = list(_texts(file, json_keys, tokenizer))
        documents = documents[: limited(len(documents), limit)]
        tokens = [tokens for tokens, _ in documents]
        _check_tokens(file, tokens, tokenizer)
        found.append(Documents(file, tokens, sum(size for _, size in documents)))
    return found


def limited(count: int, limit: float | None) -> int:
    """Return the number of documents that `--limit` leaves: the limit or, if it is below 1, this share, rounded up."""
    if limit is None:
        return count
    return math.ceil(count * limit) if limit < 1 else min(count, int(limit))


def _bare(sequences: list[np.ndarray], context: list[int], eod: int) -> list[np.ndarray]:
    """Return a document without the context before it, if any, and without end-of-document tokens after it."""
    bare = list(sequences)
    if bare and bare[0][: len(context)].tolist() == context:
        bare[0] = bare[0][len(context) :]
    while bare:
        others = np.flatnonzero(bare[-1] != eod)
        if len(others):
            bare[-1] = bare[-1][: others[-1] + 1]
            break
        bare.pop()
    return bare


def _text_bytes(documents: Sequence[Sequence[np.ndarray]], tokenizer: Tokenizer) -> tuple[int | None, str | None]:
    """Return the size of the documents' text in bytes, or None and the reason why it is unknown.

    The text is the decoded tokens. It counts as known only if encoding it gives the same tokens again.
    """
    if isinstance(tokenizer, NullTokenizer):
        return None, "NullTokenizer is for data that is already tokens, without a text"
    size = 0
    for number, sequences in enumerate(documents):
        for sequence in sequences:
            tokens = sequence.tolist()
            text = tokenizer.decode(tokens)
            try:
                same = list(tokenizer.encode(text)) == tokens
            except ValueError:
                same = False
            if not same:
                return None, f"document {number} has other tokens after decoding and encoding it again"
            size += len(text.encode())
    return size, None


def _texts(file: str, json_keys: Sequence[str], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the tokens of each document, and the size of its text in bytes."""
    for chunk in read_chunks([file], json_keys):
        for record in read_documents(chunk, json_keys):
            if isinstance(record, BadRecord):
                raise record.error()
            for texts in record.texts:
                try:
                    tokens = [token for text in texts for token in tokenizer.encode(text)]
                except ValueError as error:
                    raise DataError(f"{chunk.place(record.number)} cannot be encoded: {error}") from error
                yield np.array(tokens, np.int64), sum(len(text.encode()) for text in texts)


def _check_tokens(name: str, documents: Sequence[np.ndarray], tokenizer: Tokenizer) -> None:
    if not any(map(len, documents)):
        raise DataError(f"{name} has no tokens: there is nothing to predict")
    for number, tokens in enumerate(documents):
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < tokenizer.vocab_size:
            raise DataError(
                f"document {number} of {name} has tokens from {tokens.min()} to {tokens.max()}, but the vocabulary "
                f"of the model has {tokenizer.vocab_size}: the data was made with another tokenizer"
            )

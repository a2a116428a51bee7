"""JSON lines to token files: documents are tokenized by many processes and written in their order by one."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from megalite.data.indexed_dataset import IndexedDatasetWriter, token_dtype
from megalite.data.json_lines import Chunk, line_error, read_chunks, texts_of_chunk
from megalite.data.tokenizers import Tokenizer, build_tokenizer
from megalite.errors import DataError


@dataclass(frozen=True)
class Encoding:
    """How a line becomes tokens; what every worker is told.

    Attributes:
        json_keys: the fields of a line to tokenize, each into a file of its own.
        append_eod: end every document that has tokens with the tokenizer's `eod`.
        tokenizer_type, tokenizer_model, vocab_size: see `build_tokenizer`.
    """

    json_keys: tuple[str, ...]
    append_eod: bool
    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_size: int | None = None

    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return build_tokenizer(self.tokenizer_type, self.tokenizer_model, self.vocab_size)


class EncodedChunk(NamedTuple):
    """The documents of a chunk: for every key their tokens end to end, and the length of each."""

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    text_bytes: int


@dataclass(frozen=True)
class Progress:
    """What has been written so far."""

    documents: int
    tokens: int
    text_bytes: int
    seconds: float


def output_prefix_of(prefix: str, key: str) -> str:
    """The prefix of the files a key is written to, which is what `--data-path` takes."""
    return f"{prefix}_{key}_document"


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    encoding: Encoding,
    workers: int,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Tokenize JSON lines into `{output_prefix}_{key}_document.{bin,idx,json}`.

    The files do not depend on the number of workers. They appear when all is written; after any error or interruption
    nothing is left of them, and earlier files of the same names are as they were.

    Args:
        inputs: files of one JSON object a line; those that end in .gz are decompressed. Blank lines are skipped.
        output_prefix: where to write.
        encoding: how a line becomes tokens.
        workers: processes that tokenize; 1 tokenizes in this one.
        report: called after every chunk.

    Returns:
        What was written, all keys together.

    Raises:
        DataError: a file cannot be read or written, or a line cannot be tokenized; the message names file and line.
    """
    tokenizer = encoding.tokenizer()
    start = time.monotonic()
    progress = Progress(0, 0, 0, 0.0)
    with ExitStack() as stack:
        writers = []
        for key in encoding.json_keys:
            prefix, dtype = output_prefix_of(output_prefix, key), token_dtype(tokenizer.vocab_size)
            writers.append(stack.enter_context(IndexedDatasetWriter(prefix, dtype, tokenizer.identity())))
        text_bytes = 0
        # Closed at once after an error, not when its traceback is: then no worker outlives the message.
        chunks = stack.enter_context(closing(_encode_all(read_chunks(inputs), encoding, workers)))
        for encoded in chunks:
            for writer, tokens, lengths in zip(writers, encoded.tokens, encoded.lengths, strict=True):
                writer.add_documents(tokens, lengths)
            text_bytes += encoded.text_bytes
            tokens_written = sum(writer.tokens for writer in writers)
            progress = Progress(writers[0].documents, tokens_written, text_bytes, time.monotonic() - start)
            report(progress)
        if progress.documents == 0:
            raise DataError(f"{', '.join(inputs)}: there is not one document: expected one JSON object a line")
        for writer in writers:
            writer.finish()
    return progress


def encode_chunk(encoding: Encoding, chunk: Chunk) -> EncodedChunk:
    """The tokens of a chunk's documents.

    Raises:
        DataError: a line is not a JSON object with a text under every key, or its text cannot be tokenized.
    """
    tokenizer = _cached_tokenizer(encoding)
    documents: list[list[list[int]]] = [[] for _ in encoding.json_keys]
    for number, texts in texts_of_chunk(chunk, encoding.json_keys):
        for text, of_key in zip(texts, documents, strict=True):
            try:
                ids = tokenizer.encode(text)
            except ValueError as error:
                raise line_error(chunk.path, number, error) from error
            of_key.append([*ids, tokenizer.eod] if ids and encoding.append_eod else ids)
    lengths = [np.fromiter(map(len, of_key), np.int64, len(of_key)) for of_key in documents]
    tokens = [
        np.fromiter(chain.from_iterable(of_key), np.int32, int(counts.sum()))
        for of_key, counts in zip(documents, lengths, strict=True)
    ]
    return EncodedChunk(tokens, lengths, sum(map(len, chunk.lines)))


@functools.lru_cache(maxsize=1)
def _cached_tokenizer(encoding: Encoding) -> Tokenizer:
    return encoding.tokenizer()


def _encode_all(chunks: Iterable[Chunk], encoding: Encoding, workers: int) -> Generator[EncodedChunk, None, None]:
    if workers == 1:
        yield from (encode_chunk(encoding, chunk) for chunk in chunks)
        return
    # Fresh processes: a forked one could inherit a lock that a thread of this one holds.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, _prepare_worker)
    pending: deque[Future[EncodedChunk]] = deque()
    try:
        for chunk in chunks:
            with _interrupts_held():
                pending.append(executor.submit(encode_chunk, encoding, chunk))
            # A bound on what is read and not yet written; the oldest first, which keeps the order.
            if len(pending) > 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("a worker process was killed, perhaps for want of memory: use fewer --workers") from error
    finally:
        executor.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the end; processes started meanwhile never see it. It reaches all processes of a terminal, and
    the main one ends the others."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_worker() -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

"""Preprocessing of a corpus into token files: many processes tokenize; one reads and writes, in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from megalite.data.corpus import Chunk, find_inputs, read_chunks
from megalite.data.documents import BadRecord
from megalite.data.indexed_dataset import token_dtype
from megalite.errors import ConfigurationError, DataError
from megalite.preprocessing.encoding import EncodedChunk, Encoding, cached_tokenizer, encode_chunk
from megalite.preprocessing.length_statistics import LengthStatistics
from megalite.preprocessing.partial_output import Entry, PartialOutput, partial_folder


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    Attributes:
        documents: documents written, all runs together.
        tokens: tokens written, all keys and runs together.
        tokens_per_second, documents_per_second: rates of this run.
        fraction: fraction of the input that is done; 0 if its size is unknown.
        seconds_left: estimate of the seconds left.
    """

    documents: int
    tokens: int
    documents_per_second: float
    tokens_per_second: float
    fraction: float
    seconds_left: float | None


@dataclass(frozen=True)
class Summary:
    """Summary of the output, all keys together.

    Attributes:
        documents: records that are documents.
        tokens: tokens.
        text_bytes: size of the texts in UTF-8.
        skipped: records left out.
        lengths: statistics of the sequences' lengths.
        seconds: duration of the run; of a continued run, the last part.
        tokens_per_second: rate in that time.
    """

    documents: int
    tokens: int
    text_bytes: int
    skipped: int
    lengths: LengthStatistics
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class Observer:
    """Functions that are told of a run's progress; they are called in the process that writes."""

    note: Callable[[str], None] = lambda line: None
    progress: Callable[[Progress], None] = lambda progress: None
    skipped: Callable[[BadRecord], None] = lambda record: None


def output_prefix_of(prefix: str, key: str) -> str:
    """Return the prefix of the files a key is written to, which is a value for `--data-path`."""
    return f"{prefix}_{key}_document"


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    encoding: Encoding,
    workers: int,
    resume: bool = False,
    observer: Observer | None = None,
) -> Summary:
    """Tokenize a corpus into `{output_prefix}_{key}_document.{bin,idx,json}`.

    The files depend neither on the number of workers nor on stopping and continuing the run. They appear when all is
    written; until then earlier files of the same names stay unchanged. After an error, an interruption or a kill,
    finished work stays in `{output_prefix}.partial`.

    Args:
        inputs: files, patterns and directories; see `find_inputs` and `read_chunks`.
        output_prefix: prefix of the output files.
        encoding: rules for turning records into tokens.
        workers: processes that tokenize, in addition to this one, which reads and writes.
        resume: continue what a stopped run left, if there is anything.
        observer: functions that are told of the progress.

    Raises:
        DataError: a file cannot be read or written, or a record cannot be tokenized; the message names file and line.
        ConfigurationError: the keys or the tokenizer's flags are wrong, or a library is not installed.
    """
    _check_keys(encoding.json_keys)
    observer = observer or Observer()
    prefixes = [output_prefix_of(output_prefix, key) for key in encoding.json_keys]
    files = find_inputs(inputs, [partial_folder(output_prefix)], observer.note)
    start = time.monotonic()
    with _workers(workers, encoding) as pool:
        tokenizer = encoding.tokenizer()
        dtype = token_dtype(tokenizer.vocab_size)
        run = _run(files, encoding)
        with (
            PartialOutput(output_prefix, prefixes, dtype, tokenizer.identity(), run, resume) as output,
            _telling_what_is_kept(output, observer),
        ):
            before = output.done
            if output.resumed:
                observer.note(f"going on after {_documents(before):,} documents")
            if not output.finished:
                chunks = read_chunks(files, encoding.json_keys, before.position)
                # Closed at once after an error, not when its traceback is: then no worker outlives the message.
                with closing(_encode_all(pool, chunks, encoding, workers)) as encoded:
                    _write(output, encoded, files, observer, start)
            if not _documents(output.done):
                raise DataError(f"{', '.join(inputs)}: there is not one document: expected one JSON object a line")
            lengths = output.finish()
    return _summary(before, output.done, lengths, time.monotonic() - start)


def _check_keys(keys: Sequence[str]) -> None:
    for i, key in enumerate(keys):
        if key in keys[:i]:
            raise ConfigurationError(f"--json-keys has {key} twice: name every field once")
        if os.sep in key:
            raise ConfigurationError(
                f"--json-keys {key}: a key is part of the names of its files, which cannot hold {os.sep}: give the "
                "field another name"
            )


@contextmanager
def _telling_what_is_kept(output: PartialOutput, observer: Observer) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if output.kept:
            observer.note(f"what is done is in {output.folder}: the same command with --resume goes on from there")
        raise


def _write(
    output: PartialOutput, encoded: Iterable[EncodedChunk], files: Sequence[str], observer: Observer, start: float
) -> None:
    before, sizes = output.done, [_size(path) for path in files]
    begins = [0, *accumulate(size or 0 for size in sizes)]
    total = 0 if None in sizes else begins[-1]
    first: tuple[float, float] | None = None
    for chunk in encoded:
        output.add(chunk)
        for record in chunk.bad:
            observer.skipped(record)
        now = time.monotonic()
        fraction = (begins[chunk.end.file] + chunk.bytes_read) / total if total else 0.0
        first = first or (fraction, now)
        left = (now - first[1]) * (1 - fraction) / (fraction - first[0]) if fraction > first[0] else None
        documents, tokens = _documents(output.done), _tokens(output.done)
        done, seconds = (documents - _documents(before), tokens - _tokens(before)), now - start
        observer.progress(Progress(documents, tokens, done[0] / seconds, done[1] / seconds, fraction, left))


def _run(files: Sequence[str], encoding: Encoding) -> dict[str, Any]:
    """Return the values that must be equal to continue a stopped run, besides the tokenizer."""
    facts = [Path(path).stat() if Path(path).exists() else None for path in files]
    inputs = [
        [os.path.abspath(path), fact and [fact.st_size, fact.st_mtime_ns]]
        for path, fact in zip(files, facts, strict=True)
    ]
    return {
        "inputs": inputs,
        "json_keys": encoding.json_keys,
        "append_eod": encoding.append_eod,
        "tokenizer_hf_include_special_tokens": encoding.options.tokenizer_hf_include_special_tokens,
    }


def _size(path: str) -> int | None:
    """Return a file's size; None if it has none (a pipe) or is gone."""
    return Path(path).stat().st_size if Path(path).is_file() else None


def _documents(done: Entry) -> int:
    return done.extents[0].documents


def _tokens(done: Entry) -> int:
    return sum(extent.tokens for extent in done.extents)


def _summary(before: Entry, done: Entry, lengths: LengthStatistics, seconds: float) -> Summary:
    rate = (_tokens(done) - _tokens(before)) / seconds
    return Summary(_documents(done), _tokens(done), done.text_bytes, done.skipped, lengths, seconds, rate)


def _encode_all(
    pool: ProcessPoolExecutor, chunks: Iterable[Chunk], encoding: Encoding, workers: int
) -> Generator[EncodedChunk, None, None]:
    pending: deque[tuple[str, Future[EncodedChunk]]] = deque()
    place = "the begin of the input"
    try:
        for chunk in chunks:
            with _interrupts_held():
                pending.append((chunk.place(chunk.first), pool.submit(encode_chunk, encoding, chunk)))
            # A bound on what is read and not yet written; the oldest first, which keeps the order.
            if len(pending) > 3 * workers:
                place, future = pending.popleft()
                yield future.result()
        while pending:
            place, future = pending.popleft()
            yield future.result()
    except BrokenProcessPool as error:
        raise DataError(
            f"a worker process was killed at {place} or not far behind, perhaps for want of memory: use fewer "
            "--workers, or shorten the documents there"
        ) from error


@contextmanager
def _workers(count: int, encoding: Encoding) -> Iterator[ProcessPoolExecutor]:
    """Yield processes that begin to load the tokenizer at once."""
    # Fresh processes: a forked one could inherit a lock that a thread of this one holds.
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _prepare_worker)
    try:
        with _interrupts_held():
            for _ in range(count):
                pool.submit(_load, encoding)
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block; processes started meanwhile never see it.

    Ctrl-C reaches all processes of a terminal, and the main process ends the others itself.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _load(encoding: Encoding) -> None:
    cached_tokenizer(encoding)


def _prepare_worker() -> None:
    # Processes share the cores already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

"""Preprocessing of a corpus into token files: many processes tokenize, one process reads and writes in order."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

from megalite.config.tokenizer import EncodingFlags
from megalite.data.corpus import Chunk, find_inputs, read_chunks
from megalite.data.indexed_dataset import token_dtype
from megalite.errors import ConfigurationError, DataError
from megalite.preprocessing.encoding import EncodedChunk, open_tokenizer
from megalite.preprocessing.inspection import LengthStatistics
from megalite.preprocessing.partial_output import Entry, PartialOutput, partial_folder
from megalite.preprocessing.workers import Workers, start_workers
from megalite.process.output import say
from megalite.process.progress import Show, show_documents

# Largest number of skipped records that are reported one by one.
NAMED = 20

PATIENCE = 60.0
"""Seconds after which a text that a worker has not returned is first named. The interval doubles after each line."""


def output_prefix_of(prefix: str, key: str) -> str:
    """Return the prefix of the files that a key is written to, as `--data-path` takes it."""
    return f"{prefix}_{key}_document"


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    flags: EncodingFlags,
    workers: int,
    log_interval: int,
    resume: bool = False,
) -> tuple[Entry, LengthStatistics, float]:
    """Tokenize a corpus into `{output_prefix}_{key}_document.{bin,idx,megalite.json}`; show progress on standard error.

    The files depend neither on the number of workers nor on stopping and continuing the run. They appear only when
    everything is written; until then earlier files of the same names stay unchanged. After an error, an interruption
    or a kill, finished work stays in `{output_prefix}.partial`.

    Args:
        inputs: files, patterns and directories; see `find_inputs` and `read_chunks`.
        output_prefix: prefix of the output files.
        flags: rules for converting records to tokens.
        workers: number of processes that tokenize, in addition to this one, which reads and writes.
        log_interval: documents between two lines of progress if standard error is not a terminal.
        resume: continue the finished work of a stopped run, if there is any.

    Returns:
        output: state of the output, with its size.
        lengths: statistics of the sequences' lengths.
        rate: tokens per second of this run, without the tokens of an earlier run that it continued.

    Raises:
        DataError: a file cannot be read or written, or a record cannot be tokenized; the message names file and line.
        ConfigurationError: the keys or the tokenizer's flags are wrong, or a library is not installed.
    """
    _check_keys(flags.json_keys)
    prefixes = [output_prefix_of(output_prefix, key) for key in flags.json_keys]
    with show_documents(log_interval) as show:
        files = find_inputs(inputs, [partial_folder(output_prefix)], _print)
        start = time.monotonic()
        with start_workers(workers, flags) as pool:
            tokenizer = open_tokenizer(flags)
            dtype = token_dtype(tokenizer.vocab_size)
            run = _run(files, flags)
            with PartialOutput(output_prefix, prefixes, dtype, tokenizer.identity(), run, resume) as output:
                before = output.done
                if output.resumed:
                    _print(f"continuing after {before.documents:,} documents")
                if not output.finished:
                    chunks = read_chunks(files, flags.json_keys, before.position)
                    # Closed immediately after an error, not when its traceback is deleted: no worker should still run
                    # when the error message is shown.
                    with closing(_encode_all(pool, chunks, workers)) as encoded:
                        _write(output, encoded, files, show, start)
                if not output.done.documents:
                    raise DataError(f"{', '.join(inputs)}: there is no document: expected one JSON object per line")
                lengths = output.finish()
    rate = (output.done.tokens - before.tokens) / (time.monotonic() - start)
    return output.done, lengths, rate


def _check_keys(keys: Sequence[str]) -> None:
    for i, key in enumerate(keys):
        if key in keys[:i]:
            raise ConfigurationError(f"--json-keys has {key} twice: name every field once")
        if os.sep in key:
            raise ConfigurationError(
                f"--json-keys {key}: a key is part of the names of its files, which cannot have {os.sep}: give the "
                "field another name"
            )


def _write(
    output: PartialOutput, encoded: Iterable[EncodedChunk], files: Sequence[str], show: Show, start: float
) -> None:
    """Write the chunks, name the records that are left out, and show the progress since `start`."""
    before, sizes = output.done, [_size(path) for path in files]
    begins = [0, *accumulate(size or 0 for size in sizes)]
    total = 0 if None in sizes else begins[-1]
    first: tuple[float, float] | None = None
    skipped = 0
    for chunk in encoded:
        output.add(chunk)
        for record in chunk.bad:
            skipped += 1
            if skipped <= NAMED:
                _print(f"left out {record.place}: {record.reason}")
            if skipped == NAMED:
                _print("from now on, those left out are only counted")
        done, now = output.done, time.monotonic()
        documents_per_second = (done.documents - before.documents) / (now - start)
        tokens_per_second = (done.tokens - before.tokens) / (now - start)
        line = (
            f"{done.documents:,} documents, {done.tokens:,} tokens, {documents_per_second:,.0f} documents/s, "
            f"{tokens_per_second:,.0f} tokens/s"
        )
        fraction = (begins[chunk.end.file] + chunk.bytes_read) / total if total else 0.0
        first = first or (fraction, now)
        if fraction > first[0]:
            left = (now - first[1]) * (1 - fraction) / (fraction - first[0])
            line += f", {timedelta(seconds=round(left))} left"
        show(done.documents, fraction, line)


def _print(line: str) -> None:
    say(line, to_error=True)


def _run(files: Sequence[str], flags: EncodingFlags) -> dict[str, Any]:
    """Return the values that must be equal to continue a stopped run, in addition to the tokenizer."""
    inputs = []
    for path in files:
        status = Path(path).stat() if Path(path).exists() else None
        inputs.append([os.path.abspath(path), status and [status.st_size, status.st_mtime_ns]])
    return {
        "inputs": inputs,
        "json_keys": flags.json_keys,
        "append_eod": flags.append_eod,
        "tokenizer_hf_include_special_tokens": flags.tokenizer_hf_include_special_tokens,
    }


def _size(path: str) -> int | None:
    """Return the size of a regular file; None for a pipe or a missing file."""
    return Path(path).stat().st_size if Path(path).is_file() else None


def _encode_all(pool: Workers, chunks: Iterable[Chunk], workers: int) -> Generator[EncodedChunk, None, None]:
    pending: deque[tuple[str, Future[EncodedChunk]]] = deque()
    for chunk in chunks:
        pending.append((chunk.place(chunk.first), pool.encode(chunk)))
        # Limits the number of chunks in progress. The oldest chunk is first, which keeps the order.
        if len(pending) > 3 * workers:
            yield _awaited(pool, *pending.popleft())
    while pending:
        yield _awaited(pool, *pending.popleft())


def _awaited(pool: Workers, place: str, future: Future[EncodedChunk]) -> EncodedChunk:
    """Return the result of a worker. Say which text keeps the others waiting, and which workers are suspended."""
    began, patience = time.monotonic(), PATIENCE
    while not wait([future], patience).done:
        line = f"waiting for the text from {place} on, for {time.monotonic() - began:.0f} s so far"
        stopped = [str(number) for number in pool.suspended()]
        if stopped:
            line += f": process {', '.join(stopped)} is suspended, and goes on after kill -CONT {' '.join(stopped)}"
        _print(line)
        patience *= 2
    return future.result()

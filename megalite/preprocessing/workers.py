"""Worker processes that convert chunks of a corpus to tokens.

A thread of this process serves each of them through a pipe. The queues of `multiprocessing` would need semaphores with
names, which stay in /dev/shm if all processes of a job are killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue

from megalite.config.tokenizer import EncodingFlags
from megalite.data.corpus import Chunk
from megalite.errors import DataError, MegaliteError
from megalite.preprocessing.encoding import EncodedChunk, cached_tokenizer, encode_chunk
from megalite.process.host import is_suspended
from megalite.process.programs import safe_path

# Workers are spawned, not forked: a forked process could inherit a lock that a thread of this process has taken.
_SPAWN = multiprocessing.get_context("spawn")


class Workers:
    """Processes that convert chunks to tokens."""

    def __init__(self, count: int) -> None:
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        self._threads = ThreadPoolExecutor(count)

    def start(self, flags: EncodingFlags) -> None:
        """Start one more process, which immediately begins to load the tokenizer."""
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_work, args=(theirs, flags), daemon=True)
        with theirs, _interrupts_held(), safe_path():
            process.start()
            self._processes.append(process)
            self._connections.append(ours)
        self._idle.put(ours)

    def encode(self, chunk: Chunk) -> Future[EncodedChunk]:
        """Let the next idle process convert a chunk. The result is DataError if this process has been killed."""
        return self._threads.submit(self._encode, chunk)

    def _encode(self, chunk: Chunk) -> EncodedChunk:
        """Pass a chunk to an idle process and return its result. Runs in a thread."""
        process = self._idle.get()
        try:
            process.send(chunk)
            encoded: EncodedChunk | Exception = process.recv()
        except (EOFError, OSError) as error:
            raise DataError(
                f"a worker process was killed before it returned the text from {chunk.place(chunk.first)} on, perhaps "
                "for lack of memory: use fewer --workers, or shorten the documents there"
            ) from error
        finally:
            self._idle.put(process)
        if isinstance(encoded, Exception):
            raise encoded
        return encoded

    def suspended(self) -> list[int]:
        """Return the numbers of the processes that are stopped, as by SIGSTOP."""
        return [process.pid for process in self._processes if process.pid is not None and is_suspended(process.pid)]

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._threads.shutdown()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()


@contextmanager
def start_workers(count: int, flags: EncodingFlags) -> Iterator[Workers]:
    """Start processes, and end them after the block."""
    started = Workers(count)
    try:
        for _ in range(count):
            started.start(flags)
        yield started
    finally:
        started.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block; processes that are started in the block never receive it.

    Ctrl-C reaches all processes of a terminal, but the main process ends the others itself.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(main: Connection, flags: EncodingFlags) -> None:
    """Convert chunks until the main process ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the worker processes already use all cores
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with suppress(Exception):  # the main process and the first chunk meet the same error
        cached_tokenizer(flags)
    encoded: EncodedChunk | Exception
    with suppress(EOFError, OSError):
        while True:
            chunk = main.recv()
            try:
                encoded = encode_chunk(flags, chunk)
            except MegaliteError as error:
                encoded = error
            except Exception:
                encoded = RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
            main.send(encoded)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

"""Unfinished token files of a preprocessing run; a later run continues where they end, even after a kill.

The files grow in a folder next to the final names, together with a journal. The first line of the journal identifies
the run. Each chunk of the corpus adds one line, after its tokens are written: the place in the input where the chunk
ends, the size of each file, and a checksum of the added data. A run that continues reads the files again and uses the
journal up to the first checksum that differs. This covers everything that a kill, a full disk or a loss of power can
leave. When the files are complete and on disk, a last line is added. After that only renames and removals remain, and
the journal is removed last.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from megalite.atomic_files import lock_file, open_itself, writing_output
from megalite.data.corpus import Position
from megalite.errors import DataError, FileError
from megalite.preprocessing.encoding import EncodedChunk
from megalite.preprocessing.indexed_writer import (
    Extent,
    IndexedDatasetWriter,
    growing_files,
    publish,
    read_blocks,
    remove_unfinished,
)
from megalite.preprocessing.inspection import LengthStatistics, length_statistics
from megalite.process.output import say
from megalite.small_files import parse_json


class Entry(NamedTuple):
    """State after a chunk has been written.

    Attributes:
        position: place in the input at which the chunk ends.
        text_bytes: bytes of all texts so far.
        skipped: number of records left out so far.
        extents: size of each dataset.
        checksums: for each dataset, a checksum of the data that the chunk added.
    """

    position: Position = Position()
    text_bytes: int = 0
    skipped: int = 0
    extents: tuple[Extent, ...] = ()
    checksums: tuple[int, ...] = ()

    @property
    def documents(self) -> int:
        """Number of documents, which is the same for all datasets."""
        return self.extents[0].documents

    @property
    def tokens(self) -> int:
        """Number of tokens of all datasets."""
        return sum(extent.tokens for extent in self.extents)


JOURNAL = "journal"
# First bytes of every journal (a kill may leave fewer). A file of this name with other contents is not megalite's.
BEGIN = b'{"tool": "preprocess_data", '
# Upper bound in bytes for the length of a complete journal's last line.
LAST_LINE = 1 << 10


def partial_folder(output_prefix: str) -> Path:
    return Path(f"{output_prefix}.partial")


class PartialOutput:
    """Output of a run, from its start or from the place where an earlier run stopped.

    This is a context manager. If it exits without `finish`, it keeps the finished work, or removes the folder if no
    document is finished.

    Args:
        output_prefix: prefix that determines the folder of unfinished files.
        prefixes: prefixes of the token files to write.
        dtype: type of the stored tokens.
        tokenizer: the tokenizer's identity.
        run: JSON values that must be equal for a later run to continue.
        resume: true: continue the files of an earlier run, if there are any; false: remove them.

    Attributes:
        done: state of the written files.
        resumed: true if the run continues an earlier run.

    Raises:
        DataError: another run is writing to the folder, or its files are of a different run or not megalite's.
        FileError: the folder cannot be written to.
    """

    def __init__(
        self,
        output_prefix: str,
        prefixes: Sequence[str],
        dtype: np.dtype[Any],
        tokenizer: dict[str, Any],
        run: dict[str, Any],
        resume: bool,
    ) -> None:
        self.folder, self._prefixes, self._itemsize = partial_folder(output_prefix), prefixes, dtype.itemsize
        self.done = Entry(extents=(Extent(),) * len(prefixes))
        self._statistics: LengthStatistics | None = None
        names = [Path(prefix).name for prefix in prefixes]
        facts = {"tokenizer": tokenizer, "dtype": dtype.name, "files": names}
        header = json.loads(json.dumps({"tool": "preprocess_data"} | run | facts))
        with ExitStack() as stack:
            self._journal = stack.enter_context(_locked_journal(self.folder))
            self.resumed = resume and self._read_journal(header)
            if not self.resumed:
                self._start(header)
            self._writers = [
                stack.enter_context(IndexedDatasetWriter(prefix, dtype, tokenizer, self.folder, extent))
                for prefix, extent in zip(prefixes, self.done.extents, strict=True)
                if not self.finished
            ]
            self._open = stack.pop_all()

    def _start(self, header: dict[str, Any]) -> None:
        found, end = next(_lines(self._journal), ({}, 0))
        # Remove the entries of the old journal, but keep its header until the old files that it names are removed.
        self._journal.truncate(end)
        for name in (*found.get("files", ()), *self._prefixes):
            remove_unfinished(name, self.folder)
        self._journal.truncate(0)
        self._append(json.dumps(header).encode() + b"\n")
        # The header shows that the folder is megalite's, so it must be on disk before any other file.
        os.fsync(self._journal.fileno())

    def _read_journal(self, header: dict[str, Any]) -> bool:
        """Find the last entry whose checksums match the files, and truncate the journal after it.

        Returns:
            False if there is no run to continue.
        """
        statistics = _statistics(self._journal)
        content = _lines(self._journal)
        found, end = next(content, (None, 0))
        if found is None:
            return False
        if differing := [key for key in header if found.get(key) != header[key]]:
            raise DataError(
                f"{self.folder} is from a run with other {', '.join(differing)}: give the flags and the input files of "
                "that run, unchanged, or leave --resume out to start again"
            )
        self._statistics = statistics
        with ExitStack() as stack:
            paths = [growing_files(prefix, self.folder) for prefix in self._prefixes]
            files = [[stack.enter_context(_opened(path)) for path in of_key] for of_key in paths]
            for line, after in content:
                if "entry" not in line:
                    break
                try:
                    position, text_bytes, skipped, extents, checksums = line["entry"]
                    sizes = tuple(Extent(*extent) for extent in extents)
                    entry = Entry(Position(*position), text_bytes, skipped, sizes, tuple(checksums))
                except (TypeError, ValueError):  # an incomplete entry ends the valid part, as a wrong checksum does
                    break
                if not self.finished and self._checksums(files, entry) != entry.checksums:
                    break
                self.done, end = entry, after
        if not self.finished:
            self._journal.truncate(end)
        return True

    def _checksums(self, files: list[list[IO[bytes]]], entry: Entry) -> tuple[int, ...]:
        """Return the checksums of the data in the files between the entry before (`done`) and this one."""
        checksums = []
        for of_key, before, after in zip(files, self.done.extents, entry.extents, strict=True):
            checksum = 0
            for file, first, last, size in zip(of_key, before, after, (self._itemsize, 4, 8), strict=True):
                checksum = zlib.crc32(file.read((last - first) * size), checksum)
            checksums.append(checksum)
        return tuple(checksums)

    @property
    def finished(self) -> bool:
        """True if the earlier run completed its files and only renames are left: there is nothing to `add`."""
        return self._statistics is not None

    def add(self, chunk: EncodedChunk) -> None:
        """Write the tokens of the next chunk."""
        checksums = []
        for writer, key in zip(self._writers, chunk.keys, strict=True):
            checksums.append(writer.add_documents(key.tokens, key.lengths, key.sequences))
            writer.flush()
        self.done = Entry(
            chunk.end,
            self.done.text_bytes + chunk.text_bytes,
            self.done.skipped + len(chunk.bad),
            tuple(writer.extent for writer in self._writers),
            tuple(checksums),
        )
        self._append(json.dumps({"entry": self.done}).encode() + b"\n")

    def finish(self) -> LengthStatistics:
        """Complete the files, sync them to disk, and give them their final names.

        Returns:
            The statistics of the sequences' lengths.
        """
        statistics = self._statistics
        if statistics is None:
            for writer in self._writers:
                writer.complete()
            lengths = (read_blocks(growing_files(prefix, self.folder)[1], "<i4") for prefix in self._prefixes)
            statistics = length_statistics(chain.from_iterable(lengths))
            self._append(json.dumps({"complete": statistics}).encode() + b"\n")
            os.fsync(self._journal.fileno())
        for prefix in self._prefixes:
            publish(prefix, self.folder)
        self._remove()
        return statistics

    def _remove(self) -> None:
        for prefix in self._prefixes:
            remove_unfinished(prefix, self.folder)
        # The journal is last: without it, a later run cannot tell whose the files are or if the output is complete.
        (self.folder / JOURNAL).unlink()
        with suppress(OSError):  # the folder stays if it has files of somebody else
            self.folder.rmdir()

    def _append(self, line: bytes) -> None:
        with writing_output(self._journal.name):
            self._journal.write(line)
            self._journal.flush()

    def __enter__(self) -> PartialOutput:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not self.done.documents:
            self._remove()
        elif error is not None:
            note = f"the finished part is in {self.folder}: the same command with --resume continues it"
            say(note, to_error=True)
        self._open.close()


def _locked_journal(folder: Path) -> IO[bytes]:
    """Open the journal and lock it for this run; the system releases the lock if the process is killed."""
    path = folder / JOURNAL
    busy = DataError(f"another run is writing {folder}: wait for it, or choose another --output-prefix")
    not_ours = DataError(
        f"{folder} is for unfinished output, but it has something else in it: move that away, or choose another "
        "--output-prefix"
    )
    # Try again if another run removes its journal or the folder between two of these steps.
    for _ in range(9):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (names := os.listdir(folder)) and JOURNAL not in names:
                raise not_ours
            file = open_itself(path, "a+b")
            lock_file(file)
        except FileNotFoundError:
            continue
        except BlockingIOError as error:
            raise busy from error
        except OSError as error:
            raise FileError(f"{path} cannot be written ({error.strerror}): choose another --output-prefix") from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.seek(0)
                if BEGIN.startswith(file.read(len(BEGIN))):
                    return file
                file.close()
                raise not_ours
        file.close()
    raise busy


def _lines(file: IO[bytes]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the complete lines of a journal, each with the position of its end."""
    file.seek(0)
    end = 0
    for line in file:
        end += len(line)
        try:
            parsed = parse_json(line)
        except ValueError:
            return
        if not line.endswith(b"\n") or not isinstance(parsed, dict):
            return
        yield parsed, end


def _statistics(journal: IO[bytes]) -> LengthStatistics | None:
    """Return the statistics in the last line of a complete run's journal."""
    journal.seek(max(journal.seek(0, os.SEEK_END) - LAST_LINE, 0))
    try:
        return LengthStatistics(*parse_json(journal.read().splitlines()[-1])["complete"])
    except (ValueError, LookupError, TypeError):
        return None


def _opened(path: Path) -> IO[bytes]:
    return path.open("rb") if path.exists() else io.BytesIO()

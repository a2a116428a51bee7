"""Check of token files for damage, since opening a file reads no tokens and only a part of a large index."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megalite.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megalite.data.mapped_file import refuse_too_many_open_files
from megalite.data.side_file import CHUNK, SUFFIX, Record, side_file_path
from megalite.errors import DataError
from megalite.small_files import open_regular, reason

ENTRIES_AT_ONCE = 1 << 21
"""Index entries that every rank checks when files are opened, which takes a few milliseconds."""
BYTES_AT_START = 1 << 28
"""Bytes that are checked before the first step."""
REST = 3.0
"""Seconds of rest per second of checking after the start: the check takes a quarter of a core and of the disk's
time."""
PIECE = 1 << 20
"""Bytes that are read at a time."""
AGAIN = "Copy the three files again from where they came, or run megalite-preprocess again."

Advance = Callable[[int], None]
"""Function that is called with the number of bytes of each piece after it is checked."""


class Check(NamedTuple):
    """Part of the check, which raises DataError if it finds damage."""

    size: int
    """Number of bytes to check."""
    run: Callable[[Advance], None]


def recorded_checks(data: IndexedDataset, record: Record | None) -> list[Check]:
    """Return the checks that the side file's record makes possible; its counts are compared immediately.

    Raises:
        DataError: the record's counts differ from the index.
    """
    if record is None:
        return []
    counts = [("tokens", record.tokens, data.tokens), ("documents", record.documents, len(data.document_indices) - 1)]
    checks = []
    for path in (idx_path(data.prefix), bin_path(data.prefix)):
        checksums = record.crc32.get(path.suffix[1:])
        if checksums is not None:
            status = path.stat()
            counts.append((f"checksums of the {path.suffix}", len(checksums), -(-status.st_size // CHUNK)))
            checks.append(Check(status.st_size, partial(_check_file, path, status, checksums)))
    for what, recorded, found in counts:
        if recorded != found:
            raise DataError(
                f"{side_file_path(data.prefix)} does not belong to the files next to it: it has {recorded} {what}, "
                f"they have {found}. {AGAIN}"
            )
    return checks


def check_record(data: IndexedDataset, record: Record | None) -> None:
    """Compare a dataset with its side file's record, if there is one: every byte, if the record has checksums.

    Raises:
        DataError: they differ.
    """
    for check in recorded_checks(data, record):
        check.run(lambda size: None)


def _check_file(path: Path, opened: os.stat_result, crc32: Sequence[int], advance: Advance) -> None:
    """Compare a file with its checksums, unless the file was replaced after it was `opened`."""
    try:
        with open_regular(path) as file:
            if not os.path.samestat(os.fstat(file.fileno()), opened):
                return
            for number, recorded in enumerate(crc32):
                found, left = 0, CHUNK
                while left and (piece := file.read(min(left, PIECE))):
                    found, left = zlib.crc32(piece, found), left - len(piece)
                    advance(len(piece))
                if found != recorded:
                    raise DataError(
                        f"{path} is damaged: bytes {number * CHUNK} to {(number + 1) * CHUNK - left - 1} have another "
                        f"checksum than {path.stem}{SUFFIX} records. {AGAIN}"
                    )
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        refuse_too_many_open_files(error)
        raise DataError(f"{path} cannot be read ({reason(error)}). {AGAIN}") from error


class Verification:
    """Check of the token files of a run in a background thread, while the run starts and trains.

    Args:
        reads: true if this process checks the files, which one process per node should do. The others check small
            indexes only.
    """

    def __init__(self, reads: bool) -> None:
        self._reads = reads
        self._entries = self._done = 0
        self._checks: list[Check] = []
        self._went_on = 0.0
        self._before_start = threading.Event()
        self._damage: BaseException | None = None

    def add(self, data: IndexedDataset, record: Record | None) -> None:
        """Check a small index and the record's counts immediately, and leave the rest for the thread.

        Raises:
            DataError: the index is damaged, or the side file belongs to another index.
        """
        index = Check(8 * (len(data) + len(data.document_indices)), data.check_index)
        self._entries += index.size // 8
        if self._entries <= ENTRIES_AT_ONCE:
            index.run(lambda size: None)
        else:
            self._checks.append(index)
        self._checks += recorded_checks(data, record)

    def begin(self) -> None:
        """Start the remaining checks, the smallest first."""
        if self._reads and self._checks:
            self._checks.sort(key=lambda check: check.size)
            threading.Thread(target=self._run, name="verification", daemon=True).start()
        else:
            self._before_start.set()

    def raise_damage(self) -> None:
        """Wait until `BYTES_AT_START` bytes are checked, or all, and raise the damage found so far.

        Raises:
            DataError: a file is damaged.
        """
        self._before_start.wait()
        if self._damage is not None:
            raise self._damage

    def _run(self) -> None:
        try:
            for check in self._checks:
                check.run(self._advance)
        except BaseException as error:
            self._damage = error
        finally:
            self._before_start.set()

    def _advance(self, size: int) -> None:
        self._done += size
        if self._done > BYTES_AT_START:
            self._before_start.set()
            time.sleep(REST * (time.monotonic() - self._went_on))
        self._went_on = time.monotonic()

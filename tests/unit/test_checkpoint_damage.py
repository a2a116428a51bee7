"""Damage to the files of a checkpoint is refused or has no effect; an older checkpoint is loaded instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megalite.checkpoint.inspection import verify
from megalite.checkpoint.reader import CheckpointReader
from megalite.errors import CheckpointError, CorruptCheckpointError
from tests.harness.saved_run import SavedRun

pytestmark = pytest.mark.costly

POSITIONS = 60
"""Positions per file, evenly spaced, in addition to its first and last bytes."""
EDGE = 24
INDEX = ".metadata"
"""File that other programs read, and that `inspect --verify` checks."""


@pytest.fixture(scope="module")
def run() -> SavedRun:
    return SavedRun()


@pytest.fixture(scope="module", params=["synchronous", "torch_dist"])
def directory(run: SavedRun, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Return a run directory with two checkpoints."""
    made = tmp_path_factory.mktemp("damaged")
    run.save(made, 1, 1, request.param)
    run.save(made, 2, 2, request.param)
    return made


def files(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / "iter_0000002").rglob("*") if path.is_file())


@contextmanager
def replaced(path: Path, data: bytes | None) -> Iterator[None]:
    """Replace a file's bytes, or remove it, within the context."""
    good = path.read_bytes()
    try:
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        yield
    finally:
        path.write_bytes(good)


def refuses(run: SavedRun, path: Path) -> bool:
    """Tell whether the checkpoint in a folder is refused as damaged; otherwise it must have the saved bits.

    In both cases a check of every byte must find the damage.
    """
    try:
        found = verify(CheckpointReader(path), 1, lambda size: None)
    except CorruptCheckpointError:
        found = ["the manifest"]
    assert found
    refusal = ""
    try:
        assert run.load(path) == (2, 2)
    except CorruptCheckpointError as error:
        refusal = str(error)
    assert str(path) in refusal or not refusal
    return bool(refusal)


@pytest.mark.parametrize(
    "directory", ["synchronous", pytest.param("torch_dist", marks=pytest.mark.wide)], indirect=True
)
def test_a_flipped_bit_anywhere_is_refused_or_makes_no_difference(run: SavedRun, directory: Path) -> None:
    for path in files(directory):
        good = path.read_bytes()
        size = len(good)
        positions = {*range(0, size, max(1, size // POSITIONS)), *range(EDGE), *range(size - EDGE, size)}
        refused = 0
        for number, position in enumerate(sorted(positions)):
            flipped = bytearray(good)
            flipped[position] ^= 1 << number % 8
            with replaced(path, bytes(flipped)):
                refused += refuses(run, path.parent)
        # More than half of a small file of torch_dist are fields and gaps of torch's archives, which nothing reads.
        least = 0.3 if path.suffix == ".distcp" else 0.5
        assert refused > least * len(positions) or path.name == INDEX, f"much of {path} is not checked"


@pytest.mark.parametrize(
    "directory", ["synchronous", pytest.param("torch_dist", marks=pytest.mark.wide)], indirect=True
)
def test_a_file_that_was_cut_off_or_lengthened_or_emptied_or_is_gone(run: SavedRun, directory: Path) -> None:
    for path in files(directory):
        good = path.read_bytes()
        lengths = {0, 1, 7, 8, 9, len(good) - 1, *range(0, len(good), max(1, len(good) // 25))}
        damaged = [good[:length] for length in sorted(lengths)]
        damaged += [bytes(length) for length in (1, len(good))]  # what a file system may leave after a loss of power
        damaged += [good[: len(good) // 2] + bytes(len(good) - len(good) // 2), good + good]
        for data in (*damaged, None):
            with replaced(path, data):
                if path.name == INDEX and data is not None and len(data) == len(good):
                    assert not refuses(run, path.parent)
                    continue
                assert refuses(run, path.parent), f"{path} of {None if data is None else len(data)} bytes"
                found, passed_over = run.newest(directory)
                assert found == (1, 1)
                assert len(passed_over) == 1
        with replaced(path, good + b"\0"):
            refuses(run, path.parent)


def test_a_file_of_another_save(run: SavedRun, directory: Path) -> None:
    """Each file is intact, but they are not one checkpoint."""
    for path in files(directory):
        other = (directory / "iter_0000001" / path.name).read_bytes()
        if other != path.read_bytes():
            with replaced(path, other):
                assert refuses(run, path.parent) or path.name == INDEX


def test_a_damaged_tracker_leads_to_one_of_them_or_is_told(run: SavedRun, directory: Path) -> None:
    tracker = directory / "latest_checkpointed_iteration.txt"
    good = tracker.read_bytes()
    flipped = [
        good[:position] + bytes([good[position] ^ 1 << bit]) + good[position + 1 :]
        for position in range(len(good))
        for bit in range(8)
    ]
    for data in (*flipped, b"", bytes(len(good)), good + good, None):
        with replaced(tracker, data):
            refusal = str(tracker)
            try:
                assert run.newest(directory)[0] in ((1, 1), (2, 2))
            except CheckpointError as error:
                refusal = str(error)
            assert str(tracker) in refusal

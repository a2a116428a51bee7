"""Damage of token files: every flipped bit is found, before the first step where the files are small."""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data import side_file, verification
from megalite.data.fields import FieldsDataset
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.loader import MicroBatchLoader
from megalite.data.mock_dataset import MockDataset
from megalite.data.side_file import read_side_file
from megalite.data.verification import Verification
from megalite.errors import DataError
from megalite.preprocessing import indexed_writer
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter, publish
from tests.harness.dealt import Dealt
from tests.harness.token_files import add_document

SUFFIXES = ("bin", "idx")


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with IndexedDatasetWriter(tmp_path / "a", np.uint16, {"type": "test"}) as writer:
        for document in ([1, 2], [3, 4, 5], [], [6]):
            add_document(writer, document)
        writer.finish()
    return tmp_path / "a"


def verified(*prefixes: Path, reads: bool = True) -> Verification:
    found = Verification(reads)
    for prefix in prefixes:
        found.add(IndexedDataset(prefix, check=False), read_side_file(prefix))
    found.begin()
    return found


def small_chunks(patch: pytest.MonkeyPatch) -> None:
    for module in (indexed_writer, side_file, verification):
        patch.setattr(module, "CHUNK", 5)


@settings(deadline=None, max_examples=30)
@given(
    documents=st.lists(st.lists(st.integers(0, 1000), max_size=9), min_size=1, max_size=9),
    stop=st.integers(0, 8),
    lost=st.binary(max_size=7),
)
def test_checksums_are_of_the_files_also_where_a_writer_went_on(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], stop: int, lost: bytes
) -> None:
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch)
        with IndexedDatasetWriter(folder / "a", np.uint16, folder=folder / "growing") as writer:
            for document in documents[:stop]:
                add_document(writer, document)
        with (folder / "growing" / "a.bin").open("ab") as file:
            file.write(lost)  # which no journal knows
        with IndexedDatasetWriter(folder / "a", np.uint16, folder=folder / "growing", extent=writer.extent) as writer:
            for document in documents[stop:]:
                add_document(writer, document)
            writer.complete()
        publish(folder / "a", folder / "growing")
        for check in verification.recorded_checks(IndexedDataset(folder / "a"), read_side_file(folder / "a")):
            check.run(lambda size: None)
    crc32 = json.loads((folder / "a.megalite.json").read_text())["crc32"]
    for suffix in SUFFIXES:
        content = (folder / f"a.{suffix}").read_bytes()
        assert crc32[suffix] == [zlib.crc32(content[at : at + 5]) for at in range(0, len(content), 5)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_flipped_bit_is_refused(prefix: Path, suffix: str) -> None:
    """In every byte, and every bit of some."""
    path = Path(f"{prefix}.{suffix}")
    content = path.read_bytes()
    verified(prefix).raise_damage()
    for bit in range(0, 8 * len(content), 3):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(DataError, match=r"a\.(bin|idx|megalite\.json)"):
            verified(prefix).raise_damage()


def test_the_chunk_that_is_damaged_is_named(prefix: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small_chunks(monkeypatch)
    with IndexedDatasetWriter(tmp_path / "b", np.uint16) as writer:
        add_document(writer, list(range(6)))
        writer.finish()
    verified(tmp_path / "b").raise_damage()
    (tmp_path / "b.bin").write_bytes(np.array([0, 1, 2, 3, 4, 7], np.uint16).tobytes())
    with pytest.raises(DataError, match=r"b\.bin is damaged: bytes 10 to 11 have another checksum"):
        verified(tmp_path / "b").raise_damage()


@pytest.mark.parametrize("at_once", [0, 100])
def test_without_a_record_the_index_is_held_against_itself(
    prefix: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large index is, in the thread."""
    monkeypatch.setattr(verification, "ENTRIES_AT_ONCE", at_once)
    Path(f"{prefix}.megalite.json").unlink()
    verified(prefix).raise_damage()
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    index[46:70] = bytes(24)  # all pointers
    Path(f"{prefix}.idx").write_bytes(index)
    with pytest.raises(DataError, match="sequence 1 at byte 4, the end of those before, found it at byte 0"):
        verified(prefix).raise_damage()


def test_one_process_of_a_node_reads_all(prefix: Path) -> None:
    Path(f"{prefix}.bin").write_bytes(bytes(12))
    verified(prefix, reads=False).raise_damage()
    with pytest.raises(DataError):
        verified(prefix, reads=True).raise_damage()


def test_a_run_does_not_wait_for_what_is_large_and_ends_when_damage_is_found(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(verification, "BYTES_AT_START", 0)
    monkeypatch.setattr(verification.time, "sleep", lambda seconds: go_on.wait())
    Path(f"{prefix}.bin").write_bytes(bytes(12))
    found = verified(prefix)
    samples = FieldsDataset(MockDataset(50, 16, seed=1, num_samples=9), 49)
    sizes: Any = {"micro_batch_size": 1, "vocab_size": 50}
    with Dealt(MicroBatchLoader(samples, verification=found, **sizes)) as loader:
        assert len(loader.micro_batches(0, 2)) == 2
        go_on.set()
        next(thread for thread in threading.enumerate() if thread.name == "verification").join()
        with pytest.raises(DataError, match=r"a\.bin is damaged"):
            loader.micro_batches(2, 2)


def test_a_file_that_another_has_replaced_is_no_damage(prefix: Path) -> None:
    (check,) = (
        each for each in verification.recorded_checks(IndexedDataset(prefix), read_side_file(prefix)) if each.size == 12
    )
    Path(f"{prefix}.new").write_bytes(bytes(12))
    os.replace(f"{prefix}.new", f"{prefix}.bin")
    check.run(lambda size: None)
    Path(f"{prefix}.bin").unlink()
    check.run(lambda size: None)


RECORDS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a list": (lambda record: [record], "cannot be read as the record"),
    "a key too many": (lambda record: record | {"crc33": {}}, "does not have the right keys"),
    "no tokenizer": (lambda record: {"tokens": 6, "documents": 4}, "does not have the right keys"),
    "a text": (lambda record: record | {"tokens": "6"}, "are not counts"),
    "a huge count": (lambda record: record | {"documents": 10**30}, "whole number of 31 digits"),
    "another count": (lambda record: record | {"tokens": 7}, "has 7 tokens, they have 6"),
    "another tokenizer": (lambda record: record | {"tokenizer": {"vocab_size": "x"}}, "its tokenizer is not valid"),
    "other chunks": (lambda record: record | {"crc32": record["crc32"] | {"chunk_bytes": 1}}, "chunks of 67,108,864"),
    "no number": (lambda record: record | {"crc32": record["crc32"] | {"bin": [True]}}, "not CRC-32"),
    "too many": (lambda record: record | {"crc32": record["crc32"] | {"bin": [0, 0]}}, "2 checksums of the .bin"),
}


@pytest.mark.parametrize("what", RECORDS)
def test_a_record_that_is_none_is_refused(prefix: Path, what: str) -> None:
    path = Path(f"{prefix}.megalite.json")
    change, message = RECORDS[what]
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(DataError, match=message):
        verified(prefix)


def test_a_record_of_old_has_no_checksums(prefix: Path) -> None:
    path = Path(f"{prefix}.megalite.json")
    path.write_text(json.dumps({"tokenizer": None, "tokens": 6, "documents": 4}))
    verified(prefix).raise_damage()

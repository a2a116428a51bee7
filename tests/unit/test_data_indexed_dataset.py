"""Token files: what is written is read, and every kind of damage has its message."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.indexed_dataset import HEADER, IndexedDataset, token_dtype
from megalite.errors import DataError, FileError
from megalite.preprocessing import indexed_writer
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from tests.harness.token_files import add_document


def write(prefix: Path, documents: list[list[int]], dtype: Any = np.uint16) -> None:
    with IndexedDatasetWriter(prefix, dtype, {"type": "test"}) as writer:
        for document in documents:
            add_document(writer, document)
        writer.finish()


@settings(deadline=None, max_examples=40)
@given(
    documents=st.lists(st.lists(st.integers(0, 1000), max_size=5), max_size=12),
    dtype=st.sampled_from([np.uint16, np.int16, np.int32, np.int64]),
    mmap=st.booleans(),
)
def test_reads_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: Any, mmap: bool
) -> None:
    prefix = tmp_path_factory.mktemp("data") / "tokens"
    write(prefix, documents, dtype)
    data = IndexedDataset(prefix, mmap=mmap)
    sequences = [document for document in documents if document]
    assert [data.get(i).tolist() for i in range(len(data))] == sequences
    assert data.dtype == dtype
    assert len(data.document_indices) == len(documents) + 1
    ends = np.cumsum([bool(document) for document in documents])
    assert data.document_indices.tolist() == [0, *ends.tolist()]
    assert [[part.tolist() for part in data.document(i)] for i in range(len(documents))] == [
        [document] if document else [] for document in documents
    ]
    with pytest.raises(IndexError):
        data.get(len(sequences))


def test_layout_is_megatrons(tmp_path: Path) -> None:
    """Field by field, for a document of two sequences, an empty one and one of one sequence."""
    with IndexedDatasetWriter(tmp_path / "a", np.int32) as writer:
        add_document(writer, [7, 8, 9], lengths=[2, 1])
        add_document(writer, [])
        add_document(writer, [5])
        writer.finish()
    expected = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x04"
    expected += (3).to_bytes(8, "little") + (4).to_bytes(8, "little")
    expected += np.array([2, 1, 1], "<i4").tobytes()
    expected += np.array([0, 8, 12], "<i8").tobytes() + np.array([0, 2, 2, 3], "<i8").tobytes()
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert (tmp_path / "a.bin").read_bytes() == np.array([7, 8, 9, 5], "<i4").tobytes()


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(0, 4), max_size=20))
def test_documents_in_bulk_are_those_one_by_one(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    folder = tmp_path_factory.mktemp("data")
    tokens = np.arange(sum(lengths))
    write(folder / "single", [part.tolist() for part in np.split(tokens, np.cumsum(lengths))[:-1]])
    with IndexedDatasetWriter(folder / "bulk", np.uint16) as writer:
        for part in (slice(0, 7), slice(7, None)):
            begin = sum(lengths[: part.start])
            some = np.array(lengths[part], dtype=np.int64)
            writer.add_documents(tokens[begin : begin + some.sum()], some[some > 0], some > 0)
        writer.finish()
    for suffix in ("bin", "idx"):
        assert (folder / f"bulk.{suffix}").read_bytes() == (folder / f"single.{suffix}").read_bytes()


def test_reads_are_views_of_the_file(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4, 5]])
    data = IndexedDataset(tmp_path / "a")
    sequence = data.get(1)
    assert not sequence.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        sequence[0] = 0


def test_side_file_records_tokenizer_counts_and_checksums(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3], []])
    crc32 = {name: [zlib.crc32((tmp_path / f"a.{name}").read_bytes())] for name in ("bin", "idx")}
    assert json.loads((tmp_path / "a.megalite.json").read_text()) == {
        "tokenizer": {"type": "test"},
        "tokens": 3,
        "documents": 2,
        "crc32": {"chunk_bytes": 2**26, **crc32},
    }


def test_error_leaves_the_files_that_were_there(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3]])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RuntimeError, match="in the middle"), IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        add_document(writer, [4])
        raise RuntimeError("in the middle")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_no_moment_shows_the_index_of_other_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the files before and after each step of replacing them."""
    old, new = [[1, 2, 3], [4]], [[5], [6, 7], [8]]
    write(tmp_path / "a", old)
    seen: list[list[list[int]] | None] = []

    def looking(real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            look()
            real(*args, **kwargs)
            look()

        return call

    def look() -> None:
        if (tmp_path / "a.idx").exists():
            data = IndexedDataset(tmp_path / "a")
            seen.append([data.get(i).tolist() for i in range(len(data))])
        else:
            seen.append(None)

    for name in ("replace", "unlink"):
        monkeypatch.setattr(os, name, looking(getattr(os, name)))
    write(tmp_path / "a", new)
    assert [found for i, found in enumerate(seen) if seen[i - 1 : i] != [found]] == [old, None, new]


def test_leaving_without_finish_leaves_nothing(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "new" / "a", np.uint16) as writer:
        add_document(writer, [4])
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("tokens", [[65536], [-1]])
def test_token_that_does_not_fit_is_refused(tmp_path: Path, tokens: list[int]) -> None:
    with (
        IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer,
        pytest.raises(DataError, match=f"{tokens[0]}.*do not fit uint16"),
    ):
        add_document(writer, tokens)


def test_lengths_that_do_not_sum_to_the_tokens_are_refused(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer, pytest.raises(DataError, match="sum to 2"):
        add_document(writer, [1, 2, 3], lengths=[1, 1])


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"file/a\.bin cannot be written"):
        IndexedDatasetWriter(tmp_path / "file" / "a", np.uint16)


def test_full_disk_is_named() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    from megalite.atomic_files import TemporaryFile

    file = TemporaryFile.__new__(TemporaryFile)
    file.path = Path("corpus.bin")
    file._file = open("/dev/full", "wb")  # noqa: SIM115 - closed by sync
    file.write(b"x")
    with pytest.raises(FileError, match=r"writing corpus\.bin failed \(No space left on device\)"):
        file.sync()


def patch(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


DAMAGES: dict[str, tuple[Any, str]] = {
    "no idx": (lambda bin, idx: idx.unlink(), r"tokens\.idx does not exist"),
    "no bin": (lambda bin, idx: bin.unlink(), r"tokens\.bin does not exist"),
    "empty idx": (lambda bin, idx: idx.write_bytes(b""), r"tokens\.idx.*header of 34 bytes, found 0 bytes"),
    "short header": (lambda bin, idx: idx.write_bytes(idx.read_bytes()[:20]), "header of 34 bytes, found 20 bytes"),
    "magic": (lambda bin, idx: patch(idx, 0, b"XX"), "magic bytes .*found b'XXIDIDX"),
    "version": (lambda bin, idx: patch(idx, 9, u64(2)), "expected version 1, found version 2"),
    "type code": (lambda bin, idx: patch(idx, 17, b"\x09"), "type code from 1 to 8, found 9"),
    "float tokens": (lambda bin, idx: patch(idx, 17, b"\x07"), "integer tokens, found type code 7, float32"),
    "sequence count": (lambda bin, idx: patch(idx, 18, u64(4)), "expected 114 bytes for 4 sequences .*found 102 bytes"),
    "huge count": (lambda bin, idx: patch(idx, 18, u64(2**60)), "expected .* bytes for"),
    "idx fifo": (lambda bin, idx: (idx.unlink(), os.mkfifo(idx)), r"tokens\.idx cannot be read \(not a regular file"),
    "idx folder": (lambda bin, idx: (idx.unlink(), idx.mkdir()), r"tokens\.idx cannot be read \(Is a directory"),
    "bin fifo": (lambda bin, idx: (bin.unlink(), os.mkfifo(bin)), r"tokens\.bin.* expected 12 bytes .*found 0 bytes"),
    "bin device": (lambda bin, idx: (bin.unlink(), bin.symlink_to("/dev/zero")), r"tokens\.bin.* found 0 bytes"),
    "no boundary": (lambda bin, idx: patch(idx, 26, u64(0)), "at least one document boundary, found 0"),
    "short idx": (lambda bin, idx: idx.write_bytes(idx.read_bytes()[:-3]), "expected 102 bytes .*found 99 bytes"),
    "long idx": (lambda bin, idx: idx.write_bytes(idx.read_bytes() + b"x"), "expected 102 bytes .*found 103 bytes"),
    "modes": (lambda bin, idx: idx.write_bytes(idx.read_bytes() + b"\0\0\0"), "a multimodal one"),
    "short bin": (lambda bin, idx: bin.write_bytes(bin.read_bytes()[:-2]), "expected 12 bytes .*found 10 bytes"),
    "long bin": (lambda bin, idx: bin.write_bytes(bin.read_bytes() + b"xx"), "expected 12 bytes .*found 14 bytes"),
    "empty bin": (lambda bin, idx: bin.write_bytes(b""), "expected 12 bytes .*found 0 bytes"),
    "negative length": (lambda bin, idx: patch(idx, 34, np.int32(-2).tobytes()), "0 or more, found -2"),
    "length": (lambda bin, idx: patch(idx, 34, np.int32(5).tobytes()), "sequence 1 at byte 10, .* found it at byte 4"),
    "last length": (lambda bin, idx: patch(idx, 42, np.int32(5).tobytes()), "expected 20 bytes .*found 12 bytes"),
    "first pointer": (lambda bin, idx: patch(idx, 46, u64(2)), "sequence 0 at byte 0, .* found it at byte 2"),
    "last pointer": (lambda bin, idx: patch(idx, 46 + 16, u64(2)), "sequence 2 at byte 10, .* found it at byte 2"),
    "all pointers": (lambda bin, idx: patch(idx, 46, bytes(24)), "sequence 1 at byte 4, .* found it at byte 0"),
    "backwards": (lambda bin, idx: patch(idx, 78, u64(2) + u64(1)), "document 1, .* sequence 2, .* its end at 1"),
    "negative boundary": (lambda bin, idx: patch(idx, 78, u64(2**64 - 1)), "document 0, .* its end at -1"),
    "boundaries round 64 bits": (
        lambda bin, idx: patch(idx, 78, u64(2**63 - 1) + u64(2**63)),
        "document 1, which begins at sequence 9223372036854775807, .* its end at -9223372036854775808",
    ),
    "boundary beyond": (lambda bin, idx: patch(idx, 86, u64(2**60)), "document 2, .* its end at 3"),
    "last boundary": (lambda bin, idx: patch(idx, 102 - 8, u64(2)), "from 0 to 3, .*found 0 to 2"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_with_the_path_and_what_to_do(tmp_path: Path, damage: str) -> None:
    assert HEADER.size == 34
    write(tmp_path / "tokens", [[1, 2], [3, 4, 5], [6]])
    assert (tmp_path / "tokens.idx").stat().st_size == 102
    act, message = DAMAGES[damage]
    act(tmp_path / "tokens.bin", tmp_path / "tokens.idx")
    with pytest.raises(DataError, match=message) as error:
        IndexedDataset(tmp_path / "tokens")
    assert "megalite-preprocess" in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_token_type_is_megatrons_choice() -> None:
    assert [token_dtype(size).name for size in (257, 65499, 65500, 128256)] == ["uint16", "uint16", "int32", "int32"]


def test_an_index_of_several_blocks_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_writer, "BLOCK", 4)
    sequences = [list(range(length)) for length in (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)]
    write(tmp_path / "tokens", sequences)
    data = IndexedDataset(tmp_path / "tokens")
    assert [data.get(number).tolist() for number in range(len(data))] == sequences


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("tokens.bin", "leave out .bin, and give {}/tokens"),
        ("c.jsonl", "{}/c.jsonl is no token file; megalite-p"),
    ],
)
def test_a_file_in_place_of_a_prefix_is_answered_with_what_to_give(given: str, told: str, tmp_path: Path) -> None:
    (tmp_path / given).touch()
    with pytest.raises(DataError, match=re.escape(told.format(tmp_path))):
        IndexedDataset(tmp_path / given)

"""Every kind of input gives the same documents, and unreadable input is reported."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from megalite.data import corpus
from megalite.data.corpus import Chunk, Position, find_inputs, read_chunks
from megalite.data.documents import BadRecord, Document, read_documents
from megalite.data.indexed_dataset import IndexedDataset
from megalite.errors import ConfigurationError, DataError

pytestmark = pytest.mark.costly

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["first", "größe \u6f22", "", "a\nb" * 40, "last"] * 7


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write_zst(path: Path, content: bytes) -> None:
    """Write two frames, as in concatenated files."""
    half = len(content) // 2
    path.write_bytes(zstandard.compress(content[:half]) + zstandard.compress(content[half:]))


def write_parquet(path: Path, texts: list[str | None]) -> None:
    table = pyarrow.table({"text": texts, "number": list(range(len(texts)))})
    parquet.write_table(table, path, row_group_size=10)


def write_every_kind(folder: Path) -> dict[str, Path]:
    kinds = {name: folder / f"corpus.{name}" for name in ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")}
    kinds["jsonl"].write_bytes(lines(TEXTS))
    kinds["jsonl.gz"].write_bytes(gzip.compress(lines(TEXTS)))
    write_zst(kinds["jsonl.zst"], lines(TEXTS))
    write_parquet(kinds["parquet"], [*TEXTS])
    return kinds


def texts_of(chunks: list[Chunk]) -> list[str]:
    return [document.texts[0][0] for chunk in chunks for document in documents_of(chunk)]


def documents_of(chunk: Chunk) -> list[Document]:
    documents = list(read_documents(chunk, ["text"]))
    assert all(isinstance(document, Document) for document in documents)
    return documents  # type: ignore[return-value]


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 19])
def test_every_kind_gives_the_same_from_every_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(corpus, "CHUNK_BYTES", chunk_bytes)
    for path in write_every_kind(tmp_path).values():
        chunks = list(read_chunks([str(path)] * 2, ["text"]))
        assert texts_of(chunks) == TEXTS * 2
        assert len(chunks) > 2 or chunk_bytes > 100
        numbers = [document.number for chunk in chunks for document in documents_of(chunk)]
        assert numbers == [*range(1, len(TEXTS) + 1)] * 2
        for i in range(0, len(chunks), 1 + len(chunks) // 8):
            rest = list(read_chunks([str(path)] * 2, ["text"], chunks[i].end))
            assert texts_of(rest) == texts_of(chunks[i + 1 :])


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufefffirst line\n\nthird", encoding="utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "empty.txt").write_bytes(b"")
    files = find_inputs([str(tmp_path)])
    chunks = list(read_chunks(files, ["text"]))
    assert texts_of(chunks) == ["first line\n\nthird", "packed"]
    assert next(read_chunks(files, ["text"], Position(1, 6, 1))).path == files[2]
    (tmp_path / "c.txt").write_bytes(b"latin \xff")
    bad = next(read_documents(next(read_chunks([str(tmp_path / "c.txt")], ["text"])), ["text"]))
    assert isinstance(bad, BadRecord)
    assert bad.place == str(tmp_path / "c.txt")


def test_a_text_file_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "LARGEST_TEXT", 10)
    (tmp_path / "a.txt").write_bytes(b"x" * 11)
    with pytest.raises(DataError, match="one document of more than 0 MiB: write its documents as JSON lines"):
        list(read_chunks([str(tmp_path / "a.txt")], ["text"]))


def test_a_line_beyond_the_limit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 20)
    monkeypatch.setattr(corpus, "LARGEST_TEXT", 100)
    path = tmp_path / "c.jsonl"
    path.write_bytes(lines(["a"] * 5 + ["b" * 80]))
    assert texts_of(list(read_chunks([str(path)], ["text"]))) == ["a"] * 5 + ["b" * 80]
    for end in (b"", b"\n"):
        path.write_bytes(lines(["a"] * 5) + b"b" * 130 + end)
        with pytest.raises(DataError, match=r"c\.jsonl:6: a line of more than 0 MiB: remove it, or cut its document"):
            list(read_chunks([str(path)], ["text"]))


@pytest.mark.wide
def test_zstd_that_unpacks_to_a_thousand_times_its_size_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl.zst"
    text = bytes([ord("x")]) * (1 << 20)
    packer = zstandard.ZstdCompressor().compressobj()
    content = b"".join(packer.compress(b'{"text": "' + text + b'"}\n') for _ in range(1 << 9)) + packer.flush()
    path.write_bytes(content)
    assert len(content) < 1 << 17
    code = (
        "from pathlib import Path\n"
        "from megalite.data.corpus import read_chunks\n"
        f"print(sum(len(chunk.data) for chunk in read_chunks([{str(path)!r}], ['text'])))\n"
        # Not getrusage: its peak begins with that of the parent.
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    size, kilobytes = map(int, result.stdout.split())
    assert size == (len(text) + 13) << 9
    assert kilobytes < 300 << 10


@pytest.mark.parametrize("piece", [1, 7, 1 << 11])
def test_zstd_frames_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Several frames, empty ones, skippable ones (pzstd writes them), and the largest window of `zstd --long=31`."""
    monkeypatch.setattr(corpus, "ZSTD_PIECE", piece)
    skippable = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"notes"
    # A frame header with a window of 2^31 bytes, then one last raw block.
    content = lines(["wide"])
    block = (len(content) << 3 | 1).to_bytes(3, "little") + content
    wide = (0xFD2FB528).to_bytes(4, "little") + b"\x00" + bytes([(31 - 10) << 3]) + block
    half = len(lines(TEXTS)) // 2
    parts = [lines(TEXTS)[:half], b"", lines(TEXTS)[half:]]
    frames = [skippable, *(zstandard.compress(part) + skippable for part in parts), wide, skippable]
    path = tmp_path / "c.jsonl.zst"
    path.write_bytes(b"".join(frames))
    assert texts_of(list(read_chunks([str(path)], ["text"]))) == [*TEXTS, "wide"]


def test_links_are_followed_and_lead_nowhere_twice(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    for name in ("corpus/a.jsonl", "corpus/sub/b.jsonl", "elsewhere/c.jsonl", "elsewhere/deep/d.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "sub" / "loop").symlink_to(folder)
    (elsewhere / "again").symlink_to(elsewhere / "deep")
    (folder / "e.jsonl").symlink_to(elsewhere / ".e.jsonl")
    (elsewhere / ".e.jsonl").write_bytes(b"")
    expected = ["a.jsonl", "e.jsonl", "linked/again/d.jsonl", "linked/c.jsonl", "sub/b.jsonl"]
    assert find_inputs([str(folder)]) == [str(folder / name) for name in expected]
    (folder / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"gone\.jsonl cannot be read \(No such file"):
        list(read_chunks(find_inputs([str(folder)]), ["text"]))


def test_a_folder_that_cannot_be_listed_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.jsonl").write_bytes(b"")
    listed = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"closed cannot be read \(Permission denied\)"):
        find_inputs([str(tmp_path)])


def test_a_file_that_is_named_more_than_once_is_read_once_and_told(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "b.jsonl")
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    notes: list[str] = []
    assert find_inputs([b, str(tmp_path), a], note=notes.append) == [b, a]
    assert notes == [f"given more than once, but read once: {b} and 2 more"]


def test_the_output_among_the_input_is_left_out_and_told(tmp_path: Path) -> None:
    names = ["a.jsonl", "out_text_document.json", "out_text_document.jsonl", "out.partial/x.json"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    notes: list[str] = []
    own = [tmp_path / "out_text_document.json", tmp_path / "out.partial"]
    files = find_inputs([str(tmp_path)], own, notes.append)
    assert files == [str(tmp_path / "a.jsonl"), str(tmp_path / "out_text_document.jsonl")]
    assert notes == [f"left out {tmp_path / names[i]}: it is output of this command" for i in (3, 1)]


def test_patterns_and_directories(tmp_path: Path) -> None:
    names = [
        "b.jsonl",
        "a.jsonl.gz",
        "sub/c.parquet",
        "sub/deep/d.txt.zst",
        ".hidden/e.jsonl",
        "notes.md",
        "f.jsonl.bak",
        "sub/tokens.megalite.json",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    expected = ["a.jsonl.gz", "b.jsonl", "sub/c.parquet", "sub/deep/d.txt.zst"]
    assert find_inputs([str(tmp_path)]) == [str(tmp_path / name) for name in expected]
    assert find_inputs([f"{tmp_path}/*.jsonl*"]) == [
        str(tmp_path / name) for name in ("a.jsonl.gz", "b.jsonl", "f.jsonl.bak")
    ]
    assert find_inputs([f"{tmp_path}/**/*.parquet", f"{tmp_path}/b.jsonl"]) == [
        str(tmp_path / "sub" / "c.parquet"),
        str(tmp_path / "b.jsonl"),
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty has no file that ends in"):
        find_inputs([str(tmp_path / "empty")])
    with pytest.raises(DataError, match=r"\*\.json matches no file"):
        find_inputs([f"{tmp_path}/*.json"])


def test_a_list_of_texts_is_a_document_of_as_many_sequences(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": ["one", "", "three"]}\n{"text": []}\n{"text": "x"}\n')
    arguments = ["--input", tmp_path / "c.jsonl", "--output-prefix", tmp_path / "c", "--append-eod", "--workers", 1]
    run("--tokenizer-type", "ByteTokenizer", *arguments)
    data = IndexedDataset(tmp_path / "c_text_document")
    assert [bytes(data.get(i)[:-1].tolist()) for i in (1, 2)] == [b"three", b"x"]
    assert [data.get(i).tolist()[-1] for i in range(3)] == [ord("e"), 256, 256]
    assert data.document_indices.tolist() == [0, 2, 2, 3]


@settings(max_examples=30)
@given(content=st.binary(max_size=60))
def test_no_bytes_make_the_reader_fail(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("data") / "c.jsonl"
    path.write_bytes(content)
    chunks = list(read_chunks([str(path)], ["text"]))
    assert sum(len(list(read_documents(chunk, ["text"]))) for chunk in chunks) == sum(
        bool(line.strip()) for line in content.split(b"\n")
    )


def run(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 or not check, result.stderr
    return result


@pytest.mark.wide
def test_a_line_of_a_hundred_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    with path.open("w") as file:
        file.write('{"text": "before"}\n{"text": "' + "0123456789" * 10_000_000 + '"}\n{"text": "behind"}\n')
    arguments = ["--input", path, "--output-prefix", tmp_path / "c", "--workers", 2]
    result = run("--tokenizer-type", "ByteTokenizer", *arguments)
    assert "3 documents, 100,000,012 tokens" in result.stdout
    data = IndexedDataset(tmp_path / "c_text_document")
    assert data.sequence_lengths.tolist() == [6, 100_000_000, 6]
    assert bytes(data.get(1)[99_999_990:].tolist()) == b"0123456789"


BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "no Parquet": ("c.parquet", b"PAR1 or so", "c.parquet cannot be read"),
    "no zstd": ("c.jsonl.zst", b"plain", "c.jsonl.zst cannot be read"),
    "a cut zstd": ("c.jsonl.zst", zstandard.compress(lines(TEXTS))[:-5], "it ends in the middle of a frame"),
    "a cut gzip": ("c.jsonl.gz", gzip.compress(lines(TEXTS))[:-9], "c.jsonl.gz cannot be read"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_damaged_files_are_told(tmp_path: Path, name: str) -> None:
    file, content, message = BAD_FILES[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_chunks([str(tmp_path / file)], ["text"]))


def test_parquet_names_its_columns_and_rows(tmp_path: Path) -> None:
    write_parquet(tmp_path / "c.parquet", ["good", None, "good"])
    with pytest.raises(DataError, match=r"no column 'body' \(--json-keys\) among 'text', 'number'"):
        list(read_chunks([str(tmp_path / "c.parquet")], ["body"]))
    records = [
        r for chunk in read_chunks([str(tmp_path / "c.parquet")], ["text"]) for r in read_documents(chunk, ["text"])
    ]
    assert isinstance(records[1], BadRecord)
    assert records[1].place == f"{tmp_path / 'c.parquet'}: row 2"
    assert "is a NoneType, not a text" in records[1].reason


@pytest.mark.parametrize(("file", "library"), [("c.parquet", "pyarrow"), ("c.jsonl.zst", "zstandard")])
def test_a_missing_library_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, library: str
) -> None:
    (tmp_path / file).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f"{library}.parquet", None)
    with pytest.raises(ConfigurationError, match=rf"which needs {library}: pip install {library}"):
        list(read_chunks([str(tmp_path / file)], ["text"]))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_bytes(lines(TEXTS))
    (tmp_path / "c.jsonl").chmod(0)
    with pytest.raises(DataError, match="cannot be read \\(Permission denied\\)"):
        list(read_chunks([str(tmp_path / "c.jsonl")], ["text"]))

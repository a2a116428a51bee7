"""Merging and inspecting token files, as commands and as functions, and damage that only a full check finds."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.errors import DataError
from megalite.preprocessing import merging
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from megalite.preprocessing.inspection import length_statistics, verify
from tests.harness.fork_server import fork_context
from tests.harness.token_files import add_document
from tests.harness.tool import Ended, run_tool

pytestmark = pytest.mark.costly

ROOT = Path(__file__).resolve().parents[2]
BYTES = ByteTokenizer().identity()
COMMANDS = {
    "tools/merge_datasets.py": "merge_datasets",
    "tools/inspect_dataset.py": "inspect_dataset",
    "tools/preprocess_data.py": "preprocess",
}


def run(tool: str, *arguments: object) -> Ended:
    return run_tool(COMMANDS[tool], *arguments)


def write(prefix: Path, documents: list[list[list[int]]], dtype: type = np.uint16, tokenizer: object = BYTES) -> None:
    """Documents of sequences of tokens."""
    with IndexedDatasetWriter(prefix, dtype, tokenizer) as writer:  # type: ignore[arg-type]
        for document in documents:
            tokens = [token for sequence in document for token in sequence]
            add_document(writer, tokens, [len(sequence) for sequence in document])
        writer.finish()


DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 256), min_size=1, max_size=3), max_size=3), max_size=6)


@settings(deadline=None, max_examples=25)
@given(parts=st.lists(DOCUMENTS, min_size=1, max_size=4), block=st.integers(1, 12))
def test_merging_is_writing_all_documents_into_one(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[list[list[int]]]], block: int
) -> None:
    folder = tmp_path_factory.mktemp("data")
    for i, documents in enumerate(parts):
        write(folder / "parts" / f"part{i}", documents)
    write(folder / "all", [document for documents in parts for document in documents])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "BLOCK", block)
        merging.merge(merging.find_prefixes([str(folder / "parts")]), str(folder / "merged"))
    for suffix in ("bin", "idx", "megalite.json"):
        assert (folder / f"merged.{suffix}").read_bytes() == (folder / f"all.{suffix}").read_bytes()


def test_merging_a_directory_and_prefixes_in_their_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path / "parts" / name, [[[ord(name)]]])
    write(tmp_path / "z", [[[1, 2]]])
    result = run(
        "tools/merge_datasets.py", "--input", tmp_path / "z", tmp_path / "parts", "--output-prefix", tmp_path / "m"
    )
    assert result.code == 0, result.stderr
    assert "3 datasets, 3 documents, 4 tokens" in result.stdout
    assert f"--data-path {tmp_path / 'm'}\n" in result.stdout
    data = IndexedDataset(tmp_path / "m")
    assert [data.get(i).tolist() for i in range(3)] == [[1, 2], [ord("a")], [ord("b")]]


def test_text_named_like_the_tokens_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[1]]])
    for name in ("a.json", "merged.json"):
        (tmp_path / name).write_text('{"text": "the only copy"}\n')
    merging.merge([str(tmp_path / "a")], str(tmp_path / "merged"))
    verify(IndexedDataset(tmp_path / "merged"))
    for name in ("a.json", "merged.json"):
        assert (tmp_path / name).read_text() == '{"text": "the only copy"}\n'


def die_while_writing(prefix: Path) -> None:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        add_document(writer, [1, 2, 3])
        writer.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_merge_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[1]]])
    process = fork_context().Process(target=die_while_writing, args=(tmp_path / "merged",))
    process.start()
    process.join(60)
    assert [path.is_dir() for path in tmp_path.glob("merged*")] == [True]
    merging.merge([str(tmp_path / "a")], str(tmp_path / "merged"))
    assert {path.name for path in tmp_path.glob("merged*")} == {"merged.bin", "merged.idx", "merged.megalite.json"}


def test_what_must_not_be_merged(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[1]]])
    write(tmp_path / "wide", [[[1]]], np.int32)
    write(tmp_path / "other", [[[1]]], tokenizer={"type": "Other"})
    write(tmp_path / "unrecorded", [[[1]]], tokenizer=None)
    out = str(tmp_path / "out")
    with pytest.raises(DataError, match=r"wide has tokens as int32 and .*a as uint16"):
        merging.merge([str(tmp_path / "a"), str(tmp_path / "wide")], out)
    with pytest.raises(DataError, match=r"other was made with .* type 'Other', .*a with type 'ByteTokenizer'"):
        merging.merge([str(tmp_path / "a"), str(tmp_path / "other")], out)
    with pytest.raises(DataError, match="is one of the inputs"):
        merging.merge([str(tmp_path / "a")], str(tmp_path / "a"))
    assert not list(tmp_path.glob("out*"))
    merging.merge([str(tmp_path / "a"), str(tmp_path / "unrecorded")], out)
    assert '"tokenizer": null' in (tmp_path / "out.megalite.json").read_text()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "x.bin").write_bytes(b"")
    result = run("tools/merge_datasets.py", "--input", tmp_path / "half", "--output-prefix", out)
    assert result.code == 64
    assert "x.idx is missing" in result.stderr


def test_the_header_a_document_and_a_check(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[*b"one", 256]], [], [[*b"two"], [*b"three", 256]]])
    shown = run("tools/inspect_dataset.py", "--prefix", tmp_path / "a", "--verify")
    assert shown.code == 0, shown.stderr
    lines = dict(line.split("  ", 1) for line in shown.stdout.splitlines() if "  " in line)
    facts = {name: value.strip() for name, value in lines.items()}
    assert facts["documents"] == "3"
    assert facts["sequences"] == "3"
    assert facts["tokens"] == "13"
    assert facts["empty documents"] == "1"
    assert facts["tokenizer"] == "type 'ByteTokenizer', vocab_size 257"
    assert facts["lengths"].startswith("3 to 6 tokens, mean 4.3, median 4")
    assert "every pointer and every token is right" in shown.stdout
    tokens = run("tools/inspect_dataset.py", "--prefix", tmp_path / "a", "--document", 0)
    assert tokens.stdout == "111 110 101 256\n"
    text = run(
        "tools/inspect_dataset.py", "--prefix", tmp_path / "a", "--document", 2, "--tokenizer-type", "ByteTokenizer"
    )
    assert text.stdout == "two\nthree\n"
    missing = run("tools/inspect_dataset.py", "--prefix", tmp_path / "a", "--document", 3)
    assert missing.code == 64
    assert "has documents 0 to 2" in missing.stderr


@pytest.mark.wide
def test_a_document_of_a_tiktoken_vocabulary_with_flags_of_its_own(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks.tiktoken"
    ranks.write_bytes(b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)))
    (tmp_path / "corpus.jsonl").write_text('{"text": "one two"}\n')
    flags = ("--tokenizer-type", "TikTokenizer", "--tokenizer-model", ranks, "--tiktoken-pattern", "gpt2")
    flags += ("--tokenizer-special-tokens", "<end>=256", "<other>=257")
    source = ("--input", tmp_path / "corpus.jsonl", "--output-prefix", tmp_path / "c", "--append-eod")
    made = run("tools/preprocess_data.py", *source, *flags, "--workers", 1)
    assert made.code == 0, made.stderr
    shown = run("tools/inspect_dataset.py", "--prefix", tmp_path / "c_text_document", "--document", 0, *flags)
    assert shown.code == 0, shown.stderr
    assert shown.stdout == "one two\n"


def test_a_sample_of_a_run(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[*f"document {i:02}".encode(), 256]] for i in range(30)])
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 1, max_position_embeddings: 24}\n"
        f"data: {{seq_length: 24, data_path: [{tmp_path / 'a'}], split: '1', tokenizer_type: ByteTokenizer}}\n"
        "training: {micro_batch_size: 1, global_batch_size: 1, train_iters: 10, eval_iters: 0}\n"
        "optimizer: {lr: 1.0}\n"
    )
    shown = run("tools/inspect_dataset.py", "--config", config, "--sample", 3)
    assert shown.code == 0, shown.stderr
    assert shown.stdout.startswith("sample 3: 24 tokens, 24 count in the loss\n")
    assert shown.stdout.count("document ") >= 1
    beyond = run("tools/inspect_dataset.py", "--config", config, "--sample", 1000)
    assert beyond.code == 64
    assert "the run has samples 0 to" in beyond.stderr


def test_a_token_as_large_as_the_recorded_vocabulary_is_damage(tmp_path: Path) -> None:
    write(tmp_path / "last", [[[1, 256]]])
    verify(IndexedDataset(tmp_path / "last"))
    write(tmp_path / "size", [[[1, 257]]])
    with pytest.raises(DataError, match="token number 1 is 257, which is not one of the 257 tokens"):
        verify(IndexedDataset(tmp_path / "size"))


def test_damage_that_opening_does_not_see(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[1]], [[2, 3]], [[4]]])
    verify(IndexedDataset(tmp_path / "a"))
    (tmp_path / "a.bin").write_bytes(np.array([1, 2, 256, 4], np.uint16).tobytes())
    with pytest.raises(
        DataError, match=r"a\.bin is damaged: bytes 0 to 7 have another checksum than a\.megalite\.json"
    ):
        verify(IndexedDataset(tmp_path / "a"))


@pytest.mark.wide
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), cut=st.integers(0, 60))
def test_statistics_are_those_of_the_sorted_lengths(lengths: list[int], cut: int) -> None:
    blocks = [np.array(lengths[:cut], np.int32), np.array(lengths[cut:], np.int32)]
    found = length_statistics(blocks)
    ordered = sorted(lengths)
    assert (found.sequences, found.shortest, found.longest) == (len(lengths), ordered[0], ordered[-1])
    assert found.mean == pytest.approx(sum(lengths) / len(lengths))
    assert found.median == ordered[(len(lengths) - 1) // 2]
    assert sum(length <= found.percentile_99 for length in lengths) >= 0.99 * len(lengths)
    assert sum(length < found.percentile_99 for length in lengths) < 0.99 * len(lengths)


def test_statistics_of_nothing() -> None:
    assert length_statistics([]).longest == 0


@pytest.mark.wide
def test_a_tool_whose_output_nobody_reads_ends_without_a_word(tmp_path: Path) -> None:
    program = "from megalite.lifecycle.failure import run_tool\nrun_tool(lambda: print(*range(10**5), sep='\\n'))"
    command = [sys.executable, "-c", program]
    tool = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert tool.stdout is not None
    assert tool.stdout.readline() == b"0\n"
    tool.stdout.close()
    assert tool.wait(60) == 128 + signal.SIGPIPE
    assert tool.stderr is not None
    assert tool.stderr.read() == b""
    tool.stderr.close()


@pytest.mark.wide_except("(print(1), sys.exit(0))")
@pytest.mark.parametrize("body", ["print(*range(10**5))", "print(1)", "(print(1), sys.exit(0))"])
def test_a_full_disk_under_the_output_is_told(body: str) -> None:
    """It may be noticed while the program runs, at its end, or after --help."""
    program = f"import sys\nfrom megalite.lifecycle.failure import run_tool\nrun_tool(lambda: {body})"
    with open("/dev/full", "w") as full:
        tool = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True)
    assert tool.returncode == 93
    assert tool.stderr == "error: the output cannot be written (No space left on device): a part of it is lost\n"

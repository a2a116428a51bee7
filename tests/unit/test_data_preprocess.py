"""The commands that turn text into token files, most in the test's process."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megalite.commands.preprocess import Arguments, settle_megatron_flags
from megalite.config.tokenizer import EncodingFlags
from megalite.data import corpus as data_corpus
from megalite.data.corpus import Position, read_chunks
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.errors import ConfigurationError, DataError
from megalite.preprocessing import preprocess as preprocessing
from megalite.preprocessing import workers as processes
from megalite.preprocessing.encoding import encode_chunk
from megalite.process.host import is_suspended
from tests.harness.terminal import read_to_end
from tests.harness.tool import Ended, run_tool

pytestmark = pytest.mark.costly

ROOT = Path(__file__).resolve().parents[2]
BYTES = EncodingFlags(tokenizer_type="ByteTokenizer")
WORK = processes._work
TEXTS = [f"document {i}: " + "größe \u6f22 " * (i % 7) for i in range(300)] + ["", "last"]


COMMANDS = {"tools/preprocess_data.py": "preprocess", "tools/train_tokenizer.py": "train_tokenizer"}


def started(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def preprocess(*arguments: object, workers: int = 1) -> Ended:
    return run_tool("preprocess", "--tokenizer-type", "ByteTokenizer", *arguments, "--workers", workers)


def corpus(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "title": text[:8]}) + "\n" for text in texts))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("token", "refused"), [(256, False), (257, True), (-1, True), (2**31, True), (2**32 + 1, True), (2**70, True)]
)
def test_a_tokenizer_that_goes_beyond_its_vocabulary_is_refused(
    token: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ids(tokenizer: ByteTokenizer, texts: list[str]) -> list[list[int]]:
        return [[1, token] if text == "b" else [2] for text in texts]

    monkeypatch.setattr(ByteTokenizer, "encode_documents", ids)
    (chunk,) = read_chunks([str(corpus(tmp_path / "c.jsonl", ["a", "b"]))], ["text"])
    with pytest.raises(DataError, match=r"c\.jsonl:2: has tokens .* damaged") if refused else nullcontext():
        assert encode_chunk(BYTES, chunk).keys[0].tokens.tolist() == [2, 1, token]


def test_an_end_of_documents_beyond_the_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "eod", 257)
    (chunk,) = read_chunks([str(corpus(tmp_path / "c.jsonl", ["a"]))], ["text"])
    with pytest.raises(DataError, match=r"would end with token 257, but .* it has 257"):
        encode_chunk(replace(BYTES, append_eod=True), chunk)


def test_documents_are_the_lines_in_order(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus.jsonl", TEXTS)
    result = preprocess("--input", source, "--output-prefix", tmp_path / "out" / "c", "--append-eod")
    assert result.code == 0, result.stderr
    prefix = tmp_path / "out" / "c_text_document"
    assert f"--data-path {prefix}\n" in result.stdout
    assert "302 documents" in result.stdout
    data = IndexedDataset(prefix)
    tokenizer = ByteTokenizer()
    assert [data.get(i).tolist() for i in range(len(data))] == [
        [*tokenizer.encode(text), tokenizer.eod] for text in TEXTS if text
    ]
    # As in Megatron-LM, an empty text is a document without a sequence, and without an end.
    assert len(data.document_indices) == len(TEXTS) + 1
    assert json.loads(Path(f"{prefix}.megalite.json").read_text())["tokenizer"] == tokenizer.identity()


def test_output_does_not_depend_on_workers_nor_on_how_the_input_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_corpus, "CHUNK_BYTES", 1 << 14)
    texts = TEXTS * 10
    whole = corpus(tmp_path / "whole.jsonl", texts)
    assert whole.stat().st_size > 5 * (1 << 14)  # several chunks in flight
    first = corpus(tmp_path / "first.jsonl", texts[:700])
    second = corpus(tmp_path / "second.jsonl", texts[700:])
    packed = tmp_path / "second.jsonl.gz"
    packed.write_bytes(gzip.compress(second.read_bytes()))
    runs = [([whole], 1), ([whole], 3), ([first, packed], 2)]
    for number, (inputs, workers) in enumerate(runs):
        out = tmp_path / str(number) / "c"
        keys = ("--json-keys", "text", "title")
        result = preprocess("--input", *inputs, "--output-prefix", out, *keys, workers=workers)
        assert result.code == 0, result.stderr
    outputs = [contents(tmp_path / str(number)) for number in range(3)]
    names = {f"c_{key}_document.{suffix}" for key in ("text", "title") for suffix in ("bin", "idx", "megalite.json")}
    assert set(outputs[0]) == names
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.wide
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus.jsonl", TEXTS)
    arguments = ("--input", source, "--output-prefix", tmp_path / "c", "--log-interval", 100)
    lines = preprocess(*arguments)
    assert lines.stderr.startswith("302 documents, ")
    assert "\x1b" not in lines.stderr
    terminal, stderr = os.openpty()
    command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), "--tokenizer-type", "ByteTokenizer"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen([*command, *map(str, arguments)], stderr=stderr, env=environment)
    os.close(stderr)
    shown = read_to_end(terminal)
    assert process.wait(timeout=120) == 0
    assert "302 documents, " in shown
    assert "\x1b[" in shown


def shown_progress(monkeypatch: pytest.MonkeyPatch, sizes: list[int | None]) -> list[tuple[float, str]]:
    """Return the progress messages for files of one chunk each."""
    monkeypatch.setattr(preprocessing, "_size", lambda number: sizes[number])
    output: Any = SimpleNamespace(done=SimpleNamespace(documents=1, tokens=1), add=lambda chunk: None)
    chunks: Any = [
        SimpleNamespace(bad=[], end=Position(i), bytes_read=size) for i, size in enumerate(sizes) if size != 0
    ]
    seen: list[tuple[float, str]] = []
    files: Any = range(len(sizes))
    preprocessing._write(output, chunks, files, lambda *shown: seen.append(shown[1:]), time.monotonic() - 1)
    return seen


def test_progress_among_empty_files_and_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = shown_progress(monkeypatch, [0, 30, 0, 10, 60, 0])
    assert [fraction for fraction, _ in seen] == [0.3, 0.4, 1.0]
    assert [line.endswith(" left") for _, line in seen] == [False, True, True]
    unknown = shown_progress(monkeypatch, [30, None])
    assert {(fraction, line.endswith(" left")) for fraction, line in unknown} == {(0.0, False)}


def test_progress_costs_the_same_for_each_of_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    added = 0

    class Size(int):
        def __add__(self, other: int) -> Size:
            nonlocal added
            added += 1
            return Size(int(self) + other)

        __radd__ = __add__

    assert shown_progress(monkeypatch, [Size(1)] * 1000)[-1][0] == 1
    assert 1000 <= added <= 5000


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.wide)])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', ":3: not a JSON object"),
        *(
            pytest.param(*case, marks=pytest.mark.wide)
            for case in (
                (b'["text"]', ":3: a JSON list, not an object"),
                (b'{"title": "x"}', ":3: no field 'text' (--json-keys) among 'title'"),
                (b'{"text": 7}', ":3: the field 'text' is a int, not a text"),
                (b'{"text": "\\ud800"}', ":3: 'utf-8' codec can't encode"),
            )
        ),
        (b'{"text": "\xff"}', ":3: 'utf-8' codec can't decode"),
    ],
)
def test_a_line_that_is_wrong_is_named_and_nothing_is_left(
    tmp_path: Path, workers: int, line: bytes, message: str
) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n')
    out = tmp_path / "out"
    result = preprocess("--input", source, "--output-prefix", out / "c", workers=workers)
    assert result.code == 64
    assert result.stderr.startswith(f"error: {source}{message}")
    assert len(result.stderr.splitlines()) == 1
    assert list(out.iterdir()) == []


@pytest.mark.wide
def test_an_error_leaves_earlier_files(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus.jsonl", TEXTS)
    out = tmp_path / "out"
    assert preprocess("--input", source, "--output-prefix", out / "c").code == 0
    before = contents(out)
    source.write_text("{")
    assert preprocess("--input", source, "--output-prefix", out / "c").code == 64
    assert contents(out) == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "missing.jsonl cannot be read (No such file or directory)"),
        ("empty.jsonl", b"\n", "there is no document"),
        ("plain.jsonl.gz", b"{}", "plain.jsonl.gz cannot be read (Not a gzipped file"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:40], "cut.jsonl.gz cannot be read"),
    ],
)
def test_an_input_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = preprocess("--input", tmp_path / name, "--output-prefix", tmp_path / "out" / "c")
    assert result.code == 64
    assert message in result.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("text", "title", "text"), "--json-keys has text twice: name every field once"),
        (("title", "meta/text"), "--json-keys meta/text: a key is part of the names of its files, which cannot have /"),
    ],
)
def test_keys_that_cannot_be_written_are_refused_before_anything_is_read(
    tmp_path: Path, keys: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "out"
    result = preprocess("--input", tmp_path / "none", "--output-prefix", out / "c", "--json-keys", *keys)
    assert result.code == 64
    assert result.stderr.startswith(f"error: {message}")
    assert not out.exists()


@pytest.mark.wide
def test_output_among_the_input_is_not_read_again(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus.jsonl", TEXTS)
    arguments = ("--input", tmp_path, source, "--output-prefix", tmp_path / "c", "--json-keys", "text", "title")
    first = preprocess(*arguments)
    assert first.code == 0, first.stderr
    assert f"given more than once, but read once: {source}\n" in first.stderr
    before = contents(tmp_path)
    second = preprocess(*arguments)
    assert second.code == 0, second.stderr
    assert contents(tmp_path) == before


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.wide)])
def test_an_interruption_leaves_nothing_under_the_final_names(tmp_path: Path, number: signal.Signals) -> None:
    """The input is a pipe that stays open, so that the command is in the middle when the signal comes."""
    pipe, out = tmp_path / "corpus.jsonl", tmp_path / "out"
    os.mkfifo(pipe)
    arguments = ["--tokenizer-type", "ByteTokenizer", "--input", pipe, "--output-prefix", out / "c", "--workers", 1]
    command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), *map(str, arguments)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    with pipe.open("wb") as source:
        source.write(b'{"text": "a line to begin with"}\n' * 200_000)
        source.flush()
        assert (out / "c.partial" / "journal").read_bytes().count(b"entry") > 0
        # Ctrl-C reaches the whole group; a scheduler's SIGTERM the main process.
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    # The pipe is closed by now: a read that the signal came just before would wait for more.
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 128 + number
    assert b"Traceback" not in stderr
    assert b"c.partial: the same command with --resume continues it" in stderr
    assert [path.name for path in out.iterdir()] == ["c.partial"]


@pytest.mark.wide
def test_a_worker_that_is_suspended_is_named_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker suspends itself, and is let go on after some lines."""
    monkeypatch.setattr(preprocessing, "PATIENCE", 0.2)
    monkeypatch.setattr(processes, "_work", _suspended_once)
    said: list[str] = []
    suspended: set[int] = set()

    def say(line: str) -> None:
        said.append(line)
        own = [child for child in active_children() if isinstance(child, processes._SPAWN.Process)]  # no ranks
        suspended.update(child.pid for child in own if child.pid and is_suspended(child.pid))
        for worker in suspended if len(said) % 2 == 0 else ():
            os.kill(worker, signal.SIGCONT)

    monkeypatch.setattr(preprocessing, "_print", say)
    source = corpus(tmp_path / "corpus.jsonl", TEXTS)
    done, *_ = preprocessing.preprocess([str(source)], str(tmp_path / "c"), BYTES, 1, 1000)
    assert done.documents == len(TEXTS)
    (worker,) = suspended
    waits = rf"waiting for the text from {re.escape(str(source))}:1 on, for \d+ s so far"
    named = rf"{waits}: process {worker} is suspended, and goes on after kill -CONT {worker}"
    assert any(re.fullmatch(named, line) for line in said), said


def _suspended_once(*arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    WORK(*arguments)


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command with two workers in a session of its own, in the middle of its input."""
    pipe = tmp_path / "corpus.jsonl"
    os.mkfifo(pipe)
    arguments = ["--tokenizer-type", "ByteTokenizer", "--input", pipe, "--output-prefix", tmp_path / "c"]
    command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), *map(str, arguments), "--workers", "2"]
    process = subprocess.Popen(command, start_new_session=True)
    with pipe.open("wb") as source:
        source.write(b'{"text": "a line to begin with"}\n' * 50_000)
        source.flush()
        yield process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_workers_do_not_outlive_a_killed_parent(busy: subprocess.Popen[bytes]) -> None:
    busy.kill()
    busy.wait()
    deadline = time.monotonic() + 30
    while group_is_alive(busy.pid):
        assert time.monotonic() < deadline, "workers are still running"
        time.sleep(0.05)


@pytest.mark.wide
def test_nothing_in_shared_memory_outlives_a_killed_job(busy: subprocess.Popen[bytes]) -> None:
    """The helper process that would remove named segments is killed with the job."""
    children = Path(f"/proc/{busy.pid}/task/{busy.pid}/children").read_text().split()
    assert len(children) >= 2
    maps = "".join(Path(f"/proc/{process}/maps").read_text() for process in (busy.pid, *children))
    os.killpg(busy.pid, signal.SIGKILL)
    busy.wait()
    # By number: the system's library maps a semaphore before it gives it its name.
    used = {int(number) for number in re.findall(r" (\d+) +/dev/shm/", maps)}
    left = [entry.path for entry in os.scandir("/dev/shm") if entry.inode() in used]
    for path in left:
        os.unlink(path)
    assert left == []


def group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def fate(name: str, values: list[str]) -> tuple[list[str], str]:
    """The command line that is left of a flag, or why it is refused."""
    try:
        return settle_megatron_flags([name, *values, "--append-eod"]), ""
    except ConfigurationError as error:
        return [], str(error)


def test_every_tokenizer_flag_of_megatron_has_a_fate(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split() for line in (ROOT / "tests/unit/megatron_flags.txt").read_text().splitlines()]
    flags = [row[0] for row in rows]
    first, last = flags.index("--vocab-size"), flags.index("--use-gigatoken")
    assert last - first == 20
    own = {f"--{each.name.replace('_', '-')}" for each in fields(Arguments)}
    for *names, arity in rows[first : last + 1]:
        for name in names:
            settled, refusal = fate(name, [] if arity == "0" else ["0"])
            noted = capsys.readouterr().err
            assert bool(refusal) + bool(noted) + (settled[:1] not in ([], ["--append-eod"])) == 1, name
            if len(settled) > 1:
                assert settled[0].split("=")[0].replace("--no-", "--") in own
    assert settle_megatron_flags(["--workers=3", "--partitions", "8", "--resume"]) == ["--workers", "3", "--resume"]


@pytest.mark.parametrize("tool", ["tools/preprocess_data.py", "tools/train_tokenizer.py"])
def test_a_misspelt_flag_is_refused_with_the_right_one(tool: str) -> None:
    result = run_tool(COMMANDS[tool], "--inptu", "x", "--output_prefix=y")
    assert result.code == 64
    assert result.stderr == "error: there is no flag --inptu: did you mean --input?\n"
    missing = run_tool(COMMANDS[tool], "--input", "x")
    assert missing.code == 64
    assert "--output-prefix" in missing.stderr
    help_text = run_tool(COMMANDS[tool], "--help")
    assert help_text.code == 0
    assert "--json-keys" in help_text.stdout


@pytest.mark.wide
def test_the_standard_library_makes_a_tokenizer_and_a_dataset(tmp_path: Path) -> None:
    """The first steps of `make train`, as they are run there."""
    lines, tokenizer, prefix = tmp_path / "corpus.jsonl", tmp_path / "tokenizer", tmp_path / "data"
    tokenizer_flags = ("--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", f"{tokenizer}.model")
    output_flags = ("--output-prefix", prefix, "--append-eod", "--workers", 2)
    for arguments in (
        ("examples/standard_library_corpus.py", "--output", lines),
        ("tools/train_tokenizer.py", "--input", lines, "--vocab-size", 1000, "--output-prefix", tokenizer),
        ("tools/preprocess_data.py", "--input", lines, *output_flags, *tokenizer_flags),
    ):
        result = started(*arguments)
        assert result.returncode == 0, result.stderr
    assert lines.stat().st_size > 3_000_000
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    paths = [record["path"] for record in records]
    assert paths == sorted(paths, key=Path)
    assert "json/decoder.py" in paths
    assert not any("test" in Path(path).parts or "site-packages" in path for path in paths)
    data = IndexedDataset(f"{prefix}_text_document")
    assert len(data) == len(records)
    assert np.all([data.get(i)[-1] == 2 for i in range(len(data))])


def test_data_and_its_tools_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import megalite.data.datasets, megalite.data.loader\n"
        "import megalite.preprocessing.preprocess, megalite.preprocessing.tokenizer_training"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

"""A run that is stopped, at any moment and in any way, and then continued gives the files of an unbroken one."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.config.tokenizer import EncodingFlags
from megalite.data import corpus
from megalite.data.corpus import read_chunks
from megalite.data.indexed_dataset import token_dtype
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.errors import DataError
from megalite.preprocessing import partial_output, preprocess
from megalite.preprocessing.encoding import encode_chunk
from megalite.preprocessing.inspection import LengthStatistics
from megalite.preprocessing.partial_output import PartialOutput, partial_folder
from tests.harness.tool import run_tool
from tests.harness.wide import wide_except

pytestmark = pytest.mark.costly

ROOT = Path(__file__).resolve().parents[2]
BYTES = ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--workers", "2"]
ENCODING = EncodingFlags(json_keys=("text", "title"), append_eod=True, tokenizer_type="ByteTokenizer")
RUN = {"inputs": "the same"}


def write_corpus(path: Path, count: int, size: int, seed: int = 0) -> Path:
    randoms = random.Random(seed)
    texts = ["".join(randoms.choices("abc é\n", k=randoms.randrange(size))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text, "title": f"{i}"}) + "\n" for i, text in enumerate(texts)))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def output(prefix: Path, resume: bool, run: dict[str, str] = RUN) -> PartialOutput:
    names = [f"{prefix}_{key}" for key in ENCODING.json_keys]
    tokenizer = ByteTokenizer()
    return PartialOutput(str(prefix), names, token_dtype(tokenizer.vocab_size), tokenizer.identity(), run, resume)


def go_on(prefix: Path, source: Path, resume: bool = True) -> LengthStatistics:
    with output(prefix, resume) as partial:
        if not partial.finished:
            for chunk in read_chunks([str(source)], ENCODING.json_keys, partial.done.position):
                partial.add(encode_chunk(ENCODING, chunk))
        return partial.finish()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 300)


@pytest.mark.wide
@pytest.mark.usefixtures("small_chunks")
def test_a_kill_at_every_write_and_with_any_loss_of_what_was_written_last(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "corpus.jsonl", 60, 40)
    go_on(tmp_path / "whole" / "c", source, resume=False)
    expected = contents(tmp_path / "whole")
    assert set(expected) == {
        f"c_{key}.{suffix}" for key in ("text", "title") for suffix in ("bin", "idx", "megalite.json")
    }
    snapshots = []
    with output(tmp_path / "running" / "c", resume=False) as partial:
        for i, chunk in enumerate(read_chunks([str(source)], ENCODING.json_keys)):
            partial.add(encode_chunk(ENCODING, chunk))
            snapshots.append(shutil.copytree(partial.folder, tmp_path / f"snapshot{i}"))
    assert len(snapshots) > 10
    randoms = random.Random(1)
    for trial in range(60):
        folder = tmp_path / f"trial{trial}"
        shutil.copytree(randoms.choice(snapshots), partial_folder(str(folder / "c")))
        # What a kill or a loss of power may do to each file: cut it, fill its end with zeros, add to it.
        for path in partial_folder(str(folder / "c")).iterdir():
            data = path.read_bytes()
            keep = randoms.choice(
                [len(data), max(len(data) - randoms.randrange(300), 0), randoms.randrange(len(data) + 1)]
            )
            if path.name == "journal":  # its first line is synced
                keep = max(keep, data.index(b"\n") + 1)
            tail = randoms.choice(
                [b"", b"", bytes(len(data) - keep), b'{"entry": [[0, 1', b'{"entry": 5}\n', b"\xff" * 9]
            )
            path.write_bytes(data[:keep] + tail)
        go_on(folder / "c", source)
        assert contents(folder) == expected
        assert not partial_folder(str(folder / "c")).exists()


class Killed(BaseException):
    """Nothing of the library catches it."""


def killed_at(monkeypatch: pytest.MonkeyPatch, stop: int, prefix: Path, source: Path) -> bool:
    """Start anew, and die instead of doing the `stop`-th sync, rename or removal. Whether it came so far."""
    count = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > stop:
                raise Killed
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, dying(getattr(os, name)))
        try:
            go_on(prefix, source, resume=False)
        except Killed:
            return True
    return count > stop


@pytest.mark.wide
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("left", wide_except(["nothing", "a part", "all but the names"], ["a part"]))
def test_a_kill_at_every_step_of_beginning_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str) -> None:
    """Whatever an earlier run left unfinished, and with output of other text under the final names."""
    source = write_corpus(tmp_path / "corpus.jsonl", 15, 40)
    older = write_corpus(tmp_path / "older.jsonl", 15, 40, seed=1)
    statistics = go_on(tmp_path / "whole" / "c", source, resume=False)
    expected = contents(tmp_path / "whole")
    for stop in range(100):
        folder = tmp_path / f"at{stop}"
        go_on(folder / "c", older, resume=False)
        if left == "a part":
            with output(folder / "c", resume=False) as partial:
                partial.add(encode_chunk(ENCODING, next(read_chunks([str(source)], ENCODING.json_keys))))
        elif left == "all but the names":
            with monkeypatch.context() as patch, pytest.raises(Killed):
                patch.setattr(partial_output, "publish", lambda *_: (_ for _ in ()).throw(Killed))
                go_on(folder / "c", source, resume=False)
        died = killed_at(monkeypatch, stop, folder / "c", source)
        if partial_folder(str(folder / "c")).exists():
            assert go_on(folder / "c", source) == statistics
        assert contents(folder) == expected
        assert not partial_folder(str(folder / "c")).exists()
        if not died:
            assert stop > 25
            return
    pytest.fail("never finished")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", ["notes.txt", "journal"])
def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, name: str) -> None:
    source = write_corpus(tmp_path / "corpus.jsonl", 60, 40)
    folder = partial_folder(str(tmp_path / "c"))
    folder.mkdir()
    (folder / name).write_text("Dear diary")
    for resume in (False, True):
        with pytest.raises(DataError, match=r"c\.partial is for unfinished output, but it has something else"):
            go_on(tmp_path / "c", source, resume)
        assert contents(folder) == {name: b"Dear diary"}


@pytest.mark.usefixtures("small_chunks")
def test_what_somebody_puts_among_unfinished_output_outlives_it(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "corpus.jsonl", 60, 40)
    folder = partial_folder(str(tmp_path / "c"))
    with output(tmp_path / "c", resume=False) as partial:
        partial.add(encode_chunk(ENCODING, next(read_chunks([str(source)], ENCODING.json_keys))))
        (folder / "logs").mkdir()
        (folder / "notes.txt").write_text("Dear diary")
    go_on(tmp_path / "c", source, resume=False)
    assert sorted(path.name for path in folder.iterdir()) == ["logs", "notes.txt"]


def test_a_run_with_other_keys_begins_where_one_was_stopped(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "corpus.jsonl", 60, 40)
    with output(tmp_path / "c", resume=False) as partial:
        partial.add(encode_chunk(ENCODING, next(read_chunks([str(source)], ENCODING.json_keys))))
    tokenizer = ByteTokenizer()
    dtype, names = token_dtype(tokenizer.vocab_size), [f"{tmp_path / 'c'}_other"]
    with PartialOutput(str(tmp_path / "c"), names, dtype, tokenizer.identity(), RUN, resume=False) as other:
        assert {path.name.partition(".")[0] for path in other.folder.iterdir()} == {"journal", "c_other"}
    assert not other.folder.exists()


def test_a_header_that_a_full_disk_cut_is_no_obstacle(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "corpus.jsonl", 60, 40)
    go_on(tmp_path / "whole" / "c", source, resume=False)
    for content in (b"", b'{"to', b'{"tool": "preprocess_data", "inputs": '):
        folder = partial_folder(str(tmp_path / "out" / "c"))
        folder.mkdir(parents=True)
        (folder / "journal").write_bytes(content)
        go_on(tmp_path / "out" / "c", source)
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_run_that_ends_while_another_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second opens the journal, the first removes it, the second locks what it has opened: a nameless file."""
    first = output(tmp_path / "c", resume=False)
    flock = fcntl.flock

    def late(file: Any, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.__exit__(None, None, None)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with output(tmp_path / "c", resume=False):
        assert (partial_folder(str(tmp_path / "c")) / "journal").stat().st_size > 0
        with pytest.raises(DataError, match="another run is writing"):
            output(tmp_path / "c", resume=False)


@pytest.mark.usefixtures("small_chunks")
def test_a_different_run_is_not_continued(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "corpus.jsonl", 60, 40)
    with output(tmp_path / "c", resume=False) as partial:
        partial.add(encode_chunk(ENCODING, next(read_chunks([str(source)], ENCODING.json_keys))))
    with pytest.raises(DataError, match="from a run with other inputs: give the flags and the input files of that run"):
        output(tmp_path / "c", resume=True, run={"inputs": "changed"})
    with output(tmp_path / "c", resume=True) as partial, pytest.raises(DataError, match="another run is writing"):
        assert partial.resumed
        output(tmp_path / "c", resume=True)


@pytest.mark.parametrize(
    "change",
    [
        {"json_keys": ("text",)},
        {"append_eod": False},
        {"tokenizer_hf_include_special_tokens": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_run_that_writes_other_tokens_is_a_different_one(change: dict[str, Any]) -> None:
    assert preprocess._run([], ENCODING) != preprocess._run([], replace(ENCODING, **change))


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "tools/preprocess_data.py"), *map(str, arguments)]


def test_only_who_wrote_something_is_told_how_to_go_on(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "corpus.jsonl", 60, 40)
    arguments = ["--input", source, "--output-prefix", tmp_path / "c", *BYTES]
    folder = partial_folder(str(tmp_path / "c"))
    with output(tmp_path / "c", resume=False) as partial:
        partial.add(encode_chunk(ENCODING, next(read_chunks([str(source)], ENCODING.json_keys))))
        second = run_tool("preprocess", *arguments)
        wait = "wait for it, or choose another --output-prefix"
        assert second.stderr == f"error: another run is writing {folder}: {wait}\n"
    different = run_tool("preprocess", *arguments, "--resume")
    assert different.stderr.startswith(f"error: {folder} is from a run with other inputs")
    assert (folder / "journal").stat().st_size > 0


@pytest.mark.wide
def test_kills_of_the_real_command(tmp_path: Path) -> None:
    """SIGKILL to the command alone, again and again, until it gets through; its workers die with it."""
    source = write_corpus(tmp_path / "corpus.jsonl", 40_000, 400)
    assert source.stat().st_size > 8 * corpus.CHUNK_BYTES
    subprocess.run(command("--input", source, "--output-prefix", tmp_path / "whole" / "c", *BYTES), check=True)
    randoms, kills = random.Random(2), 0
    journal = tmp_path / "out" / "c.partial" / "journal"
    again = command("--input", source, "--output-prefix", tmp_path / "out" / "c", *BYTES, "--resume")
    for attempt in range(12):
        process = subprocess.Popen(again, start_new_session=True, stdout=subprocess.DEVNULL)
        begin = journal.stat().st_size if journal.exists() else 0
        while process.poll() is None and attempt < 5 and (not journal.exists() or journal.stat().st_size <= begin):
            time.sleep(0.005)
        time.sleep(randoms.random() * 0.02)
        if attempt < 5 and process.poll() is None:
            process.kill()
            kills += 1
            if attempt < 3:
                assert not list((tmp_path / "out").glob("*.idx"))
        if process.wait(timeout=120) == 0:
            break
    assert kills > 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not journal.parent.exists()


@pytest.mark.wide
def test_a_bad_line_then_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 1 << 13)
    source = write_corpus(tmp_path / "corpus.jsonl", 600, 400)
    lines = source.read_text().splitlines(keepends=True)
    source.write_text("".join([*lines[:450], '{"text": 7}\n', *lines[450:]]))
    arguments = ("--input", source, *BYTES)
    stopped = run_tool("preprocess", *arguments, "--output-prefix", tmp_path / "out" / "c")
    assert stopped.code == 64
    assert f"error: {source}:451: the field 'text' is a int, not a text. Correct or remove it" in stopped.stderr
    assert "--skip-bad-lines" in stopped.stderr
    assert "c.partial: the same command with --resume continues it" in stopped.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["c.partial"]
    skipping = (*arguments, "--skip-bad-lines")
    went_on = run_tool("preprocess", *skipping, "--output-prefix", tmp_path / "out" / "c", "--resume")
    assert went_on.code == 0, went_on.stderr
    assert "continuing after" in went_on.stderr
    assert f"left out {source}:451: the field 'text' is a int" in went_on.stderr
    assert "1 bad lines were left out" in went_on.stdout
    assert "600 documents" in went_on.stdout
    assert run_tool("preprocess", *skipping, "--output-prefix", tmp_path / "whole" / "c").code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.wide
def test_a_full_disk_then_a_freed_one(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    source = write_corpus(tmp_path / "corpus.jsonl", 1_500, 400)
    arguments = ["--input", source, *BYTES]

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))

    full = subprocess.run(
        command(*arguments, "--output-prefix", tmp_path / "out" / "c"), capture_output=True, text=True, preexec_fn=limit
    )
    assert full.returncode == 93
    assert "c_text_document.bin failed (File too large): free space or choose another output path" in full.stderr
    assert "Traceback" not in full.stderr
    for folder, more in (("out", ["--resume"]), ("whole", [])):
        prefix = tmp_path / folder / "c"
        assert run_tool("preprocess", *arguments, "--output-prefix", prefix, *more).code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.wide
def test_a_worker_that_is_killed_ends_the_run_with_a_message(tmp_path: Path) -> None:
    pipe = tmp_path / "corpus.jsonl"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        command("--input", pipe, "--output-prefix", tmp_path / "c", *BYTES), stderr=subprocess.PIPE, text=True
    )
    with pipe.open("wb") as source:
        source.write(b'{"text": "a line to begin with"}\n' * 100_000)
        source.flush()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        workers = [pid for pid in map(int, children) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 64
    assert "a worker process was killed before it returned the text from " in stderr
    assert "use fewer --workers" in stderr

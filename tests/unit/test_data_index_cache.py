"""Indices on disk: built once, found by content, whole or absent whatever happens meanwhile."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data import index_cache
from megalite.data.blend import BlendedDataset
from megalite.data.chat import ChatTemplate
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.index_cache import Arrays, IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.sft_dataset import ConversationFile
from megalite.data.side_file import recorded_tokenizer
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.errors import ConfigurationError
from tests.harness.fork_server import fork_context
from tests.unit.test_data_gpt_dataset import write

ARRAYS = {"order": np.arange(1000, dtype=np.uint32), "places": np.arange(60, dtype=np.int64).reshape(30, 2)}


def get(directory: Path, build: Callable[[], Arrays] = lambda: ARRAYS, **description: Any) -> tuple[Arrays, list[str]]:
    cache = IndexCache(str(directory))
    return cache.get("unused", description or {"a": 1}, build), cache.notes


def never() -> Arrays:
    raise AssertionError("these arrays are on disk")


def assert_right(arrays: Arrays) -> None:
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert np.array_equal(arrays[name], array)


def is_mapped(array: object) -> bool:
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return isinstance(array.obj if isinstance(array, memoryview) else array, ctypes.Array)


def only_folder(directory: Path) -> Path:
    (folder,) = directory.iterdir()
    return folder


def test_arrays_are_computed_once_and_mapped(tmp_path: Path) -> None:
    for build in (lambda: ARRAYS, never):
        arrays, notes = get(tmp_path / "cache", build)
        assert_right(arrays)
        assert notes == []
        assert not arrays["order"].flags.writeable
        assert is_mapped(arrays["order"])
    assert {path.name for path in only_folder(tmp_path / "cache").iterdir()} == {
        "description.json",
        "order.npy",
        "places.npy",
    }


def test_another_description_has_other_arrays(tmp_path: Path) -> None:
    get(tmp_path, a=1)
    other, _ = get(tmp_path, lambda: {"order": np.zeros(3)}, a=2)
    assert other["order"].tolist() == [0, 0, 0]
    assert_right(get(tmp_path, never, a=1)[0])


def test_arrays_lie_beside_their_data_by_default(tmp_path: Path) -> None:
    IndexCache().get(str(tmp_path / "data" / "tokens"), {}, lambda: ARRAYS)
    assert only_folder(tmp_path / "data").name == "cache"


def test_an_array_without_elements(tmp_path: Path) -> None:
    for _ in range(2):
        assert get(tmp_path, lambda: {"order": np.zeros((0, 2))})[0]["order"].shape == (0, 2)


def dataset(prefix: Path, cache: Path, seed: int = 1, num_samples: int = 50) -> GPTDataset:
    indexed = IndexedDataset(prefix)
    return GPTDataset(indexed, range(len(indexed)), num_samples, 8, seed, IndexCache(str(cache)))


def test_data_replaced_under_its_path_gets_other_indices_and_moved_data_keeps_them(tmp_path: Path) -> None:
    data, cache = tmp_path / "tokens", tmp_path / "cache"
    write(data, [np.arange(n) for n in (5, 9, 30)])
    before = [row.tolist() for row in map(dataset(data, cache).__getitem__, range(50))]
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{data}{suffix}", tmp_path / f"moved{suffix}")
    assert [row.tolist() for row in map(dataset(tmp_path / "moved", cache).__getitem__, range(50))] == before
    assert len(list(cache.iterdir())) == 1

    times = os.stat(f"{data}.idx")
    write(data, [np.arange(n) for n in (9, 5, 30)])
    os.utime(f"{data}.idx", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert os.stat(f"{data}.idx").st_size == times.st_size
    replaced = dataset(data, cache)
    fresh = dataset(data, tmp_path / "empty")
    assert np.array_equal(replaced.sample_index, fresh.sample_index)
    assert len(list(cache.iterdir())) == 2


def test_indices_depend_on_what_they_are_computed_from_and_on_no_more(tmp_path: Path) -> None:
    write(tmp_path / "tokens", [np.arange(n) for n in (5, 9, 30)])
    lengths = []
    # 44 tokens an epoch: 44 and 46 samples need nine of them, the last apart.
    for seed, num_samples in ((1, 44), (1, 46), (2, 46), (1, 47)):
        dataset(tmp_path / "tokens", tmp_path / "cache", seed, num_samples)
        lengths.append(len(list((tmp_path / "cache").iterdir())))
    assert lengths == [1, 1, 2, 3]


# ---------------------------------------------------------------------------------------------------- damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def describe_otherwise(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"description": "{}"}))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("order.npy", cut),
        ("order.npy", flip),
        ("places.npy", Path.unlink),
        ("places.npy", lambda path: path.write_bytes(b"")),
        ("description.json", Path.unlink),
        ("description.json", cut),
        ("description.json", describe_otherwise),
        ("description.json", lambda path: path.write_text("[]")),
        ("description.json", lambda path: path.write_text("[" * 100_000)),
        ("description.json", lambda path: (path.unlink(), os.mkfifo(path))),
        ("places.npy", lambda path: (path.unlink(), os.mkfifo(path))),
        ("description.json", lambda path: path.write_text('{"description": "{\\"a\\": 1}", "crc32": 5}')),
    ],
)
def test_damaged_arrays_are_computed_again_with_a_note(
    tmp_path: Path, name: str, damage: Callable[[Path], Any]
) -> None:
    get(tmp_path)
    damage(only_folder(tmp_path) / name)
    arrays, notes = get(tmp_path)
    assert_right(arrays)
    assert len(notes) == 1
    assert "is computed again" in notes[0]
    assert get(tmp_path, never)[1] == []
    assert only_folder(tmp_path).is_dir()


def test_a_directory_that_cannot_be_written_is_noted_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = IndexCache(str(tmp_path / "file" / "cache"))
    for number in range(2):
        assert_right(cache.get("unused", {"a": number}, lambda: ARRAYS))
    assert len(cache.notes) == 1
    assert "cannot be kept" in cache.notes[0]
    assert "give --data-cache-path" in cache.notes[0]


def test_a_full_disk_leaves_the_arrays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    arrays, notes = get(tmp_path)
    assert_right(arrays)
    assert "(No space left on device)" in notes[0]
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------- processes


def die_at(directory: Path, event: int) -> None:
    """Get the arrays, and end without a word at the `event`-th thing done to a file of the cache."""
    seen = 0

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if name.startswith(("open", "os.", "shutil.", "tempfile.")) and str(directory) in str(arguments):
            seen += 1
            if seen == event:
                os._exit(9)

    sys.addaudithook(hook)
    get(directory)


def test_a_process_may_die_at_any_moment(tmp_path: Path) -> None:
    deaths = 0
    for event in range(1, 100):
        directory = tmp_path / str(event)
        process = fork_context().Process(target=die_at, args=(directory, event))
        process.start()
        process.join(60)
        arrays, notes = get(directory)
        assert_right(arrays)
        assert notes == []
        kept = [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".lock"]
        assert len(kept) == 3
        if process.exitcode == 0:
            break
        deaths += 1
    assert 8 < deaths < 99


def test_nodes_without_a_common_lock_leave_each_other_alone(tmp_path: Path) -> None:
    """A file system where each node grants the lock: both compute, and what the faster one uses stays."""

    def slower() -> Arrays:
        assert_right(get(tmp_path)[0])
        first = only_folder(tmp_path).stat().st_ino
        built.append(first)
        return ARRAYS

    built: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", lambda *_: None)
        arrays, notes = get(tmp_path, slower)
    assert_right(arrays)
    assert notes == []
    assert [only_folder(tmp_path).stat().st_ino] == built


@pytest.mark.parametrize("kind", ["link", "link to nothing", "fifo", "folder"])
def test_what_stands_in_the_place_of_a_lock_is_left_alone(kind: str, tmp_path: Path) -> None:
    directory, other = tmp_path / "cache", tmp_path / "other"
    get(directory)
    lock = directory / f"{only_folder(directory).name}.lock"
    shutil.rmtree(only_folder(directory))
    if kind == "link":
        other.write_text("of the user")
    if kind.startswith("link"):
        lock.symlink_to(other)
    else:
        (os.mkfifo if kind == "fifo" else os.mkdir)(lock)
    assert_right(get(directory)[0])
    assert_right(get(directory, never)[0])
    assert os.path.lexists(lock)
    assert [path.read_text() for path in tmp_path.glob("other")] == ["of the user"] * (kind == "link")


def test_folders_that_others_are_writing_stay(tmp_path: Path) -> None:
    get(tmp_path)
    name = only_folder(tmp_path).name
    shutil.rmtree(tmp_path / name)
    dead = fork_context().Process(target=int)
    dead.start()
    dead.join()
    here = os.uname().nodename
    kept, gone = (f"{here}.{os.getppid()}", "elsewhere.1"), (f"{here}.{dead.pid}", f"{here}.{os.getpid()}", "old.1")
    for owner in kept + gone:
        (tmp_path / f"{name}.{owner}.megalite.tmp").mkdir()
    os.utime(tmp_path / f"{name}.old.1.megalite.tmp", (0, 0))
    assert get(tmp_path)[1] == []
    assert {path.name for path in tmp_path.iterdir()} == {name, *(f"{name}.{owner}.megalite.tmp" for owner in kept)}


def with_no_file_left(directory: Path, prefix: Path) -> None:
    limit = len(os.listdir("/proc/self/fd")) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    files = []
    with suppress(OSError):
        while True:
            files.append(open(os.devnull))  # noqa: SIM115
    for act in (lambda: get(directory, never), lambda: IndexedDataset(prefix), lambda: recorded_tokenizer(prefix)):
        with pytest.raises(ConfigurationError, match=rf"too many open files \(the limit is {limit} per.*ulimit -n"):
            act()


def test_too_many_open_files_are_no_damage(tmp_path: Path) -> None:
    get(tmp_path / "cache")
    write(tmp_path / "tokens", [np.arange(5)])
    process = fork_context().Process(target=with_no_file_left, args=(tmp_path / "cache", tmp_path / "tokens"))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    get(tmp_path / "cache", never)


def build_slowly(directory: Path, log: Path, seconds: float) -> None:
    def build() -> Arrays:
        with log.open("a") as file:
            file.write("built\n")
        time.sleep(seconds)
        return ARRAYS

    arrays, notes = get(directory, build)
    assert_right(arrays)
    assert notes == []


def test_processes_at_once_compute_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = (tmp_path / "cache", log, 0.3)
    processes = [fork_context().Process(target=build_slowly, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert log.read_text() == "built\n"
    assert only_folder(tmp_path / "cache").is_dir()


def test_a_process_killed_while_it_computes_gives_way(tmp_path: Path) -> None:
    log, cache = tmp_path / "log", tmp_path / "cache"
    first = fork_context().Process(target=build_slowly, args=(cache, log, 100.0))
    first.start()
    while not log.exists():
        time.sleep(0.01)
    second = fork_context().Process(target=build_slowly, args=(cache, log, 0.0))
    second.start()
    time.sleep(0.2)
    assert second.exitcode is None
    assert log.read_text() == "built\n"
    first.kill()
    second.join(60)
    assert second.exitcode == 0
    assert log.read_text() == "built\n" * 2


def test_a_process_that_stands_still_with_the_lock_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(tmp_path)
    lock = only_folder(tmp_path).with_suffix(".lock")
    shutil.rmtree(only_folder(tmp_path))
    monkeypatch.setattr(index_cache, "_LOCK_SECONDS", 0.2)
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        arrays, notes = get(tmp_path)
    assert_right(arrays)
    assert notes == []


# ---------------------------------------------------------------------------------------------------- kept apart


def samples_of(dataset: Any) -> list[Any]:
    """All that its samples hold, as lists."""
    rows = [dataset[sample] for sample in range(len(dataset))]
    return [row.tolist() if isinstance(row, np.ndarray) else {k: v.tolist() for k, v in row.items()} for row in rows]


def assert_kept_apart(build: Callable[[IndexCache, Any], Any], cases: list[Any], folder: Path) -> None:
    """Whatever the cache holds of the other cases, each has the samples that it has without one; and all differ."""
    cache = folder / "cache"
    found = [samples_of(build(IndexCache(str(cache)), case)) for case in [*cases, *cases]]
    alone = [samples_of(build(IndexCache(str(folder / f"cache {n}")), case)) for n, case in enumerate(cases)]
    assert found == alone * 2
    assert all(one != other for n, one in enumerate(alone) for other in alone[:n])


def test_samples_of_tokens_do_not_come_from_the_indices_of_others(tmp_path: Path) -> None:
    """Use other tokens of the same number, with as many samples per epoch."""
    write(tmp_path / "tokens", [np.arange(10 * n, 10 * n + 11) for n in range(4)])
    indexed = IndexedDataset(tmp_path / "tokens")
    case = {"sequences": range(2), "num_samples": None, "sequence_length": 10, "seed": 1}
    others = [{"sequences": range(2, 4)}, {"num_samples": 5}, {"sequence_length": 9}, {"seed": 3}]
    cases = [case, *(case | other for other in others)]
    assert_kept_apart(lambda cache, case: GPTDataset(indexed, **case, cache=cache), cases, tmp_path)


def test_blends_do_not_come_from_the_indices_of_others(tmp_path: Path) -> None:
    parts = [[np.array([10 * part + n]) for n in range(9)] for part in range(3)]

    def build(cache: IndexCache, case: tuple[list[float] | None, int]) -> BlendedDataset[np.ndarray]:
        return BlendedDataset(parts, *case, cache, [str(tmp_path / "tokens")])

    cases = [([1.0, 2.0, 3.0], 8), ([3.0, 2.0, 1.0], 8), ([1.0, 2.0, 3.0], 9), (None, 8)]
    assert_kept_apart(build, cases, tmp_path)


class OtherBytes(ByteTokenizer):
    """Tokenizer that gives as many tokens, but other ones."""

    def encode_with_offsets(self, text: str) -> tuple[Any, np.ndarray]:
        ids, offsets = super().encode_with_offsets(text)
        return [255 - token for token in ids], offsets

    def identity(self) -> dict[str, Any]:
        return {"type": "OtherBytes"}


@pytest.mark.wide
def test_conversations_do_not_come_from_the_indices_of_others(tmp_path: Path) -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}X{{ m.content }}{% endfor %}{% if add_generation_prompt %}"
    )
    source += "assistantX{% endif %}"
    messages = [[("user", f"q{n}"), ("assistant", f"answer {n}")] for n in range(6)]
    records = [{"messages": [{"role": role, "content": text} for role, text in each]} for each in messages]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))

    def build(cache: IndexCache, case: dict[str, Any]) -> Any:
        keys = ("tokenizer", "template", "sequence_length", "seed")
        file = ConversationFile(str(path), **{key: case[key] for key in keys}, cache=cache)
        return file.dataset(case["sequences"], case["num_samples"])

    case = {
        "tokenizer": ByteTokenizer(),
        "template": ChatTemplate(source, {"bos_token": "a"}),
        "sequence_length": 40,
        "seed": 1,
        "sequences": range(3),
        "num_samples": None,
    }
    others: list[dict[str, Any]] = [
        {"tokenizer": OtherBytes()},
        {"template": ChatTemplate(source.replace("X", "YZ"), {"bos_token": "a"})},
        {"template": ChatTemplate(source, {"bos_token": "b"})},
    ]
    others += [{"sequence_length": 90}, {"seed": 2}, {"sequences": range(3, 6)}, {"num_samples": 7}]
    assert_kept_apart(build, [case, *(case | changes for changes in others)], tmp_path)

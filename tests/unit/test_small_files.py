"""Small files: what is bounded, and what is refused, at once."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from megalite.config import DataConfig
from megalite.config.yaml_file import load_yaml, read_file
from megalite.conversion.huggingface import open_huggingface
from megalite.data.chat import find_template
from megalite.data.dataset_spec import read_dataset_specs
from megalite.data.index_cache import IndexCache
from megalite.data.side_file import read_side_file
from megalite.errors import MegaliteError
from megalite.inference.text import read_prompts
from megalite.pipeline.trace import read_trace
from megalite.small_files import DEEPEST, MOST_MARKS, parse_json, parse_toml, read_json, read_small_file, shown
from megalite.watchdog.hang_dump import read_dumps


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    assert read_small_file(tmp_path / "a", largest=1000) == b"x" * 1000


@pytest.mark.parametrize(
    ("kind", "message"),
    [("fifo", "not a regular file"), ("device", "not a regular file"), ("large", "larger than its limit of 1 MiB")],
)
def test_what_has_no_end_is_refused_at_once(kind: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(2**40)
    with pytest.raises(ValueError, match=message):
        read_small_file(path, largest=2**20)


def test_a_folder_and_a_missing_file_are_errors_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_small_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_small_file(tmp_path / "missing")


def test_links_stay_in_the_folder(tmp_path: Path) -> None:
    for model in ("models--some--name", "work"):
        inside, blobs = tmp_path / model / "snapshots" / "1", tmp_path / model / "blobs"
        inside.mkdir(parents=True)
        blobs.mkdir()
        (blobs / "blob").write_text("[]")
        (inside / "cached").symlink_to("../../blobs/blob")
        for outside in (tmp_path / "secret", blobs.parent / "secret", blobs.parent / "snapshots" / "secret"):
            outside.write_text("{}")
            (inside / "out").unlink(missing_ok=True)
            (inside / "out").symlink_to(outside)
            with pytest.raises(ValueError, match="outside its folder"):
                read_json(inside / "out", folder=inside)
            assert read_json(inside / "out") == {}
    with pytest.raises(ValueError, match="outside its folder"):  # work/snapshots is no cache of Hugging Face's
        read_json(inside / "cached", folder=inside)
    (tmp_path / "elsewhere").symlink_to("models--some--name/snapshots/1")
    assert read_json(tmp_path / "elsewhere" / "cached", folder=tmp_path / "elsewhere") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested deeper"),
        ("[" * (DEEPEST + 2) + "]" * (DEEPEST + 2), "nested deeper"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "'b' is twice"),
        ("[18446744073709551616]", "of 20 digits"),
        ("[-9223372036854775809]", "of 19 digits"),
        ("9" * 6000, "of 6000 digits"),
        ("{", "Expecting"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_a_repeated_key_is_found_in_one_pass() -> None:
    names = ",".join(f'"{number}":1' for number in range(60_000))
    started = time.process_time()
    with pytest.raises(ValueError, match="the key '59999' is twice"):
        parse_json(f'{{{names},"59999":1}}')
    assert time.process_time() - started < 5


@contextmanager
def traced_memory() -> Iterator[list[int]]:
    """Gives the most bytes that are allocated within it."""
    peak = []
    tracemalloc.start()
    try:
        yield peak
    finally:
        peak.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


FEW = ["{}", "[[[[[[1]]]]]]", '"a"']
MORE = ["[]", '{"a":1}', "1"]


@pytest.mark.parametrize("values", [*FEW, *(pytest.param(values, marks=pytest.mark.wide) for values in MORE)])
def test_what_would_take_many_times_its_bytes_is_refused_before_it_is_made(values: str) -> None:
    text = f"[{','.join([values] * (MOST_MARKS + 1))}]"
    for each in (text, text.encode()):
        with traced_memory() as peak, pytest.raises(ValueError, match="and colons, but 3,000,000 are allowed"):
            parse_json(each)
        assert peak[0] < 10**5


FEW = ["{}", '{"a":{"a":{"a":{}}}}', "1.5"]
MORE = ["[]", '{"a":1}', "[[[[[[1]]]]]]", '"ab"']


@pytest.mark.wide
@pytest.mark.parametrize("values", [*FEW, *(pytest.param(values, marks=pytest.mark.wide) for values in MORE)])
def test_a_mark_takes_a_hundred_bytes_at_most(values: str) -> None:
    text = f"[{','.join([values] * 10_000)}]"
    with traced_memory() as peak:
        parsed = parse_json(text)
    assert len(parsed) == 10_000
    assert peak[0] <= 100 * sum(map(text.count, "{[,:")) + 2 * len(text)


def test_a_negative_zero_is_no_whole_number() -> None:
    assert repr(parse_json("-0")) == "-0.0"


def test_what_is_within_the_bounds_is_json() -> None:
    deep = "[" * DEEPEST + "]" * DEEPEST
    for text in (deep, "18446744073709551615", "-9223372036854775808", '{"a": [1.5, null, {"a": "b"}]}', "3"):
        assert parse_json(text) == json.loads(text)


def test_what_is_shown_is_short() -> None:
    nested: list[object] = []
    for _ in range(60):
        nested = [nested, nested]
    for value in ("x" * 10**6, 10**5000, nested, {"a": nested}, list(range(10**6)), "a\nb\x00", None):
        assert len(shown(value)) <= 100
        assert shown(value).isprintable()
    assert shown("short") == "'short'"


READERS: dict[str, Callable[[Path], object]] = {
    "run.yaml": lambda path: load_yaml(read_file(str(path))),
    "trace.json": read_trace,
    "prompts.jsonl": lambda path: read_prompts([], str(path)),
    "blend.json": lambda path: read_dataset_specs(DataConfig(seq_length=1, per_split_data_args_path=str(path))),
    "rank_00000.json": lambda path: read_dumps(path.parent),
    "nccl_trace_rank_0": lambda path: read_dumps(path.parent),
    "data.megalite.json": lambda path: read_side_file(path.parent / "data"),
    "config.json": lambda path: open_huggingface(path.parent),
    "tokenizer_config.json": lambda path: find_template(str(path.parent)),
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_in_a_line_what_is_no_small_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name

    def large(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(2**40)

    for make in (
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        large,
        lambda path: path.write_text("[" * 10**5),
    ):
        make(path)
        with pytest.raises(MegaliteError) as raised:
            READERS[name](path)
        assert len(str(raised.value)) < 600
        path.unlink()


@pytest.mark.parametrize(
    ("name", "largest"),
    [("run.yaml", 1), ("blend.json", 8), ("data.megalite.json", 8), ("config.json", 4), ("tokenizer_config.json", 16)],
)
def test_a_reader_takes_no_more_than_such_a_file_has(name: str, largest: int, tmp_path: Path) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(largest * 2**20 + 1)
    with pytest.raises(MegaliteError, match=rf"larger than its limit of {largest} MiB"):
        READERS[name](tmp_path / name)


def test_a_cached_index_that_cannot_be_read_is_computed_again(tmp_path: Path) -> None:
    cache = IndexCache(str(tmp_path))
    arrays = {"a": np.arange(3)}
    cache.get("data", {}, lambda: arrays)
    (path,) = tmp_path.glob("*/description.json")
    for make in (os.mkfifo, lambda path: path.write_text("[" * 10**5)):
        path.unlink()
        make(path)
        assert cache.get("data", {}, lambda: arrays)["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (".".join("a" * 100_000) + "=1", "of 100,000 dots, brackets, commas and the like, but 10,000 are allowed"),
        (".".join("a" * 2000) + "=1", "a key of more than 64 parts"),
        (" . ".join(["'a'", '"b c"'] * 40) + "=1", "a key of more than 64 parts"),
        ("a=1\n[" + ".".join("a" * 70) + "]", "a key of more than 64 parts"),
        ("a=" + "[" * 5000, "nested deeper than 64 levels"),
        ("a=1\na=2", "Cannot overwrite a value"),
    ],
    ids=["dots", "key", "quoted", "table", "lists", "twice"],
)
def test_toml_is_bounded_before_it_is_parsed(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        parse_toml(text)


def test_toml_with_many_dots_in_texts_is_read() -> None:
    assert parse_toml("a.b = '1.2.3'\nc = '" + "." * 100 + "'\n")["a"] == {"b": "1.2.3"}

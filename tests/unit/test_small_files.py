"""Small files: what is bounded, and what is refused, at once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megalite.small_files import DEEPEST, parse_json, read_json, read_small_file


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    assert read_small_file(tmp_path / "a", largest=1000) == b"x" * 1000


@pytest.mark.parametrize(
    ("kind", "message"),
    [("fifo", "no regular file"), ("device", "no regular file"), ("large", "larger than the 1 MiB")],
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
    inside, outside = tmp_path / "model" / "snapshots" / "1", tmp_path / "secret"
    inside.mkdir(parents=True)
    outside.write_text("{}")
    (inside / "out").symlink_to(outside)
    (tmp_path / "model" / "blob").write_text("[]")
    (inside / "cached").symlink_to("../../blob")
    (tmp_path / "elsewhere").symlink_to(inside)
    with pytest.raises(ValueError, match="out of its folder"):
        read_json(inside / "out", folder=inside)
    assert read_json(tmp_path / "elsewhere" / "cached", folder=tmp_path / "elsewhere") == []
    assert read_json(inside / "out") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested deeper"),
        ("[" * (DEEPEST + 2) + "]" * (DEEPEST + 2), "nested deeper"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "'b' stands twice"),
        ("[18446744073709551616]", "of 20 digits"),
        ("[-9223372036854775809]", "of 19 digits"),
        ("9" * 6000, "of 6000 digits"),
        ("{", "Expecting"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_a_negative_zero_is_no_whole_number() -> None:
    assert repr(parse_json("-0")) == "-0.0"


def test_what_is_within_the_bounds_is_json() -> None:
    deep = "[" * DEEPEST + "]" * DEEPEST
    for text in (deep, "18446744073709551615", "-9223372036854775808", '{"a": [1.5, null, {"a": "b"}]}', "3"):
        assert parse_json(text) == json.loads(text)

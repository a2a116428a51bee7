"""Files that appear complete, and the removal of what killed processes leave."""

from __future__ import annotations

import ast
import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.atomic_files import (
    DAY,
    TEMPORARY,
    TemporaryFile,
    lock_file,
    open_itself,
    require_output,
    temporary_path,
    write_atomically,
)
from megalite.errors import ConfigurationError, FileError

ROOT = Path(__file__).parents[2]


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path: Path) -> None:
    """Files that another process, or another machine's process, may still be writing are not removed."""
    path, host = tmp_path / "config.yaml", os.uname().nodename
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = [f"{host}.{ended.pid}", "another.12345"]
    kept = [f"{host}.{os.getppid()}", "another.1"]
    for name in (*left, *kept):
        path.with_name(f"config.yaml.{name}{TEMPORARY}").write_text("half")
    old = path.with_name(f"config.yaml.{left[1]}{TEMPORARY}")
    os.utime(old, times=(old.stat().st_mtime - 2 * DAY,) * 2)
    write_atomically(path, b"whole")
    assert path.read_bytes() == b"whole"
    assert {each.name for each in tmp_path.iterdir()} == {
        "config.yaml",
        *(f"config.yaml.{name}{TEMPORARY}" for name in kept),
    }


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileError, match="no regular file"):
        write_atomically(pipe, b"text")
    with pytest.raises(ConfigurationError, match=f"^--output {pipe}: is no regular file"):
        require_output("--output", pipe)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_places_of_output_are_known_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("new", "file", "new/folders/new"):
        require_output("--output", tmp_path / path)
    problems = {"file/new": "file is no folder", "file/a/b": "file is no folder", "": "no regular"}
    if os.path.isdir("/proc/self"):  # root may write to it, but not make files there
        problems["/proc/new/file"] = "/proc cannot be written to"
    for path, problem in problems.items():
        with pytest.raises(ConfigurationError, match=problem):
            require_output("--output", tmp_path / path)
    assert not (tmp_path / "new").exists()


# ---------------------------------------------------------------------------------------------------- planted links


@pytest.mark.parametrize("mode", ["w", "a", "ab", "a+", "r+b"])
def test_a_link_is_not_followed(mode: str, tmp_path: Path) -> None:
    (tmp_path / "another").write_text("kept")
    (tmp_path / "file").symlink_to(tmp_path / "another")
    with pytest.raises(OSError, match="it is a link, which is not followed: remove it"):
        open_itself(tmp_path / "file", mode)
    assert (tmp_path / "another").read_text() == "kept"


def test_a_link_to_nothing_makes_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to(tmp_path / "another")
    with pytest.raises(OSError, match="it is a link"):
        open_itself(tmp_path / "file", "w")
    assert not (tmp_path / "another").exists()


def test_a_link_under_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "another").write_text("kept")
    temporary_path(tmp_path / "file").symlink_to(tmp_path / "another")
    with pytest.raises(FileError, match=r"file cannot be written \(it is a link"):
        TemporaryFile(tmp_path / "file")
    assert (tmp_path / "another").read_text() == "kept"


def test_files_are_opened_for_writing_in_one_place() -> None:
    """Only under a name that is new ("x") can no link lie."""
    found = []
    for path in ROOT.glob("megalite/**/*.py"):
        text = path.read_text()
        if not re.search("open|write_text|write_bytes|touch", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and (called := getattr(node.func, "attr", getattr(node.func, "id", ""))):
                texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                opens = called == "open" and any(re.fullmatch("[rwab+t]*[wa+][rwab+t]*", text) for text in texts)
                if opens or called in ("write_text", "write_bytes", "touch"):
                    found.append(f"{path.relative_to(ROOT)} {called}")
    assert sorted(found) == [
        "megalite/data/index_cache.py write_text",  # in a folder that it has just made
        "megalite/extras/chaos/injection.py open",  # damages what is there
        "megalite/process/output.py open",  # the null device
        "megalite/process/output.py open",
        "megalite/storage.py open",  # an object of an object store
        "megalite/training/metrics.py write_bytes",  # in a temporary folder
    ]


def test_a_file_is_locked_by_one_at_a_time_where_there_are_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(code: int) -> Callable[..., None]:
        def flock(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        return flock

    with (tmp_path / "file").open("wb") as first, (tmp_path / "file").open("wb") as second:
        assert lock_file(first) == ""
        with pytest.raises(BlockingIOError):
            lock_file(second)
        first.close()
        assert lock_file(second) == ""
        monkeypatch.setattr("fcntl.flock", fails(errno.ENOLCK))
        assert lock_file(second) == "No locks available"
        monkeypatch.setattr("fcntl.flock", fails(errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            lock_file(second)

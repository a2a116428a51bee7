"""Files that appear complete, and the removal of what killed processes leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.atomic_files import DAY, TEMPORARY, require_output, write_atomically
from megalite.errors import ConfigurationError, FileError


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

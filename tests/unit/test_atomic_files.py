"""Files that appear complete, and the removal of what killed processes leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megalite.atomic_files import DAY, TEMPORARY, write_atomically


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

"""Room for the files and connections of a start."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from megalite.process import host
from megalite.process.host import cores, memory_limit, require_open_files
from tests.harness.fork_server import RankFailure
from tests.harness.forks import in_clean_process


def _ask_for_thirty(least: int, most: int) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + least, opened + most))
    require_open_files(30)


def test_a_limit_that_can_be_raised_is_no_obstacle() -> None:
    """The usual 1024 are few for rank 0 of a thousand ranks, and no more than what a process begins with."""
    in_clean_process(_ask_for_thirty, 10, 60)


def test_a_limit_that_cannot_be_raised_is_told() -> None:
    with pytest.raises(RankFailure, match="ConfigurationError: there are too many open files"):
        in_clean_process(_ask_for_thirty, 10, 20)


def test_cores_are_counted_where_no_process_is_restricted_to_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS is such a system. The configuration asks for the cores when it is imported."""
    assert cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == os.cpu_count()


MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/job/step\n", {"job/memory.max": "4096\n", "job/step/memory.max": "max\n"}, 4096),
        ("0::/job/step\n", {"job/memory.max": "8192\n", "job/step/memory.max": "4096\n"}, 4096),
        ("0::/../other\n", {"memory.max": "4096\n"}, 4096),  # a container sees its own group as the root
        ("2:cpu:/job\n1:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "4096"}, 4096),
        ("1:hugetlb,memory:/gone\n", {"memory/memory.limit_in_bytes": "4096"}, 4096),
        ("1:cpu:/job\n", {"cpu/job/memory.max": "4096"}, MACHINE),
        ("1:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, MACHINE),  # no limit
    ],
)
def test_memory_is_what_the_control_groups_leave(
    groups: str, files: dict[str, str], limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    (tmp_path / "own").write_text(groups)
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(host, "OWN_CGROUPS", tmp_path / "own")
    assert memory_limit() == limit
    (tmp_path / "own").unlink()  # not on Linux
    assert memory_limit() == MACHINE

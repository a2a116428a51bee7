"""Room for the files and connections of a start."""

from __future__ import annotations

import os
import resource

import pytest

from megalite.process.host import cores, require_open_files
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

"""Who may be killed by a process beside it: only a process of the same user and launcher, known by its start."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megalite.process import host
from megalite.process.host import kill_sibling, start_of

NOT_OURS = "it was not started for this run by the same launcher"

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")


@contextmanager
def child(*command: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command or ("sleep", "60"), stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def with_children_for_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)


@pytest.mark.parametrize("with_handles", [True, False])
def test_a_sibling_of_this_run_is_killed_though_it_is_stopped(
    with_handles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_handles:
        monkeypatch.delattr(os, "pidfd_open")
    with child() as victim:
        victim.send_signal(signal.SIGSTOP)
        start = start_of(victim.pid)
        assert start > 0
        assert kill_sibling(victim.pid, start + 1) == NOT_OURS
        assert victim.poll() is None
        assert kill_sibling(victim.pid, start) is None
        assert victim.wait(10) == -signal.SIGKILL
        assert kill_sibling(victim.pid, start) is None  # it has gone


def test_nobody_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with child("sh", "-c", "sleep 60 & echo $!; wait") as other:
        assert other.stdout is not None
        nephew = int(other.stdout.readline())
        assert kill_sibling(nephew, start_of(nephew)) == NOT_OURS
        os.kill(nephew, signal.SIGKILL)  # it was still there
    for process in (1, os.getpid()):
        assert kill_sibling(process, start_of(process)) is not None
    for process in (0, -1, -os.getpid(), 2**31 - 1):
        assert kill_sibling(process, 0) is None
    if os.getuid() == 0:
        with child(user=65534) as of_another:
            assert kill_sibling(of_another.pid, start_of(of_another.pid)) == NOT_OURS
            assert of_another.poll() is None


def test_it_never_is_the_process_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    own = host._look(os.getpid())
    monkeypatch.setattr(os, "getppid", lambda: own.parent)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: pytest.fail("it was signalled"))
    assert kill_sibling(os.getpid(), own.start) == "it is the process that was to kill it"


def test_what_the_signal_goes_to_is_what_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number may be another process's by then; a handle may not."""
    calls: list[str] = []
    hold, look, send = os.pidfd_open, host._look, signal.pidfd_send_signal
    with child() as victim:
        start = start_of(victim.pid)
        monkeypatch.setattr(os, "pidfd_open", lambda number: calls.append("hold") or hold(number))
        monkeypatch.setattr(host, "_look", lambda number: calls.append("look") or look(number))
        monkeypatch.setattr(signal, "pidfd_send_signal", lambda *of: calls.append("send") or send(*of))
        assert kill_sibling(victim.pid, start) is None
        assert victim.wait(10) == -signal.SIGKILL
    assert calls == ["hold", "look", "send"]

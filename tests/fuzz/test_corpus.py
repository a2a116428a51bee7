"""Regression tests of all findings of the fuzzer, and tests that the fuzzer finds faults."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.forks import in_clean_process

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.json"))


def _replay(paths: list[Path], folder: Path) -> list[str]:
    """The faults that inputs show."""
    from tests.fuzz import campaign, child, programs

    programs.warm()
    child.adopt_orphans()
    samples, faults = campaign.Samples(folder / "samples"), []
    for path in paths:
        entry = json.loads(path.read_text())
        outcome = campaign.try_input(entry["kind"], entry["edits"], samples, folder / "input")
        if outcome.fault is not None:
            faults.append(f"{path.name}: {outcome.fault}, {outcome.place}")
    return faults


STRANGERS = [path for path in CORPUS if path.name.startswith("watchdog")]  # a run of two ranks for each
SLOW = [
    path for path in CORPUS if path.stem in ("manifest-01", "manifest-03", "manifest-06", "manifest-11", "messages-05")
]
"""Inputs that take as much time as all others together: two checkpoints' manifests are left to the quick ones."""
QUICK = [path for path in CORPUS if path not in (*STRANGERS, *SLOW)]


@pytest.mark.wide  # `make fuzz` runs it, as all of this folder
@pytest.mark.parametrize("part", range(3))
def test_nothing_that_was_found_comes_back(part: int, tmp_path: Path) -> None:
    assert in_clean_process(_replay, QUICK[part::3], tmp_path) == []


@pytest.mark.wide
def test_nothing_that_takes_longer_comes_back(tmp_path: Path) -> None:
    assert in_clean_process(_replay, SLOW, tmp_path) == []


@pytest.mark.wide
def test_no_stranger_that_was_found_comes_back(tmp_path: Path) -> None:
    assert in_clean_process(_replay, STRANGERS, tmp_path) == []


def _leave_a_child() -> None:
    if not os.fork():
        time.sleep(60)


def _fill() -> None:
    pages = bytearray(1 << 29)
    pages[::4096] = b"x" * len(pages[::4096])
    time.sleep(60)


def _say(lines: int) -> None:
    os.write(2, b"error: something is wrong\n" * lines)
    raise SystemExit(64)


PROGRAMS: dict[str, tuple[Callable[[], object], str | None]] = {
    "good": (lambda: None, None),
    "a refusal": (lambda: _say(1), None),
    "a long refusal": (lambda: _say(20), "a message of many lines"),
    "an error": (lambda: 1 // 0, "a traceback"),
    "another code": (lambda: os._exit(70), "ended by exit code 70"),
    "a crash": (os.abort, "ended by SIGABRT"),
    "silence": (lambda: os._exit(93), "ended without a message"),
    "a file": (lambda: Path("written").touch(), "something was written outside"),
    "a file at home": (lambda: Path("~/.profile").expanduser().touch(), "something was written outside"),
    "a child": (_leave_a_child, "a process was left behind"),
    "memory": (_fill, "too much resident memory"),
    "waiting": (lambda: time.sleep(60), "no end: it waits for what does not come"),
    "work without end": (lambda: any(iter(int, 1)), "no end"),
    "what its format forbids": (lambda: Path("../out/forbidden").touch(), "accepted what is wrong"),
}


def _judge(names: list[str], folder: Path) -> dict[str, str | None]:
    from tests.fuzz import child

    child.adopt_orphans()
    child.IDLE_SECONDS, child.SECONDS, child.MEMORY = 0.8, 2.0, child.usage(os.getpid())[2] + (1 << 28)
    found = {}
    for name in names:
        base = folder / name
        child.make_folders(base)
        forbidden = base / "out" / "forbidden"
        outcome = child.run(PROGRAMS[name][0], base, lambda forbidden=forbidden: "it" if forbidden.exists() else None)
        found[name] = outcome.fault
    return found


@pytest.mark.wide
def test_the_rule_finds_each_fault(tmp_path: Path) -> None:
    found = in_clean_process(_judge, list(PROGRAMS), tmp_path)
    assert found == {name: fault for name, (_, fault) in PROGRAMS.items()}

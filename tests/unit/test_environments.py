"""Environments of other Pythons and torches: what is found, what is made again, and what is told."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import environments
from tests.environments import ENVIRONMENTS, Environment, find_python

ANY = Environment("any", "", "2.13.0")


def test_another_torch_or_version_of_a_package_is_another_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environments, "CONSTRAINTS", tmp_path / "constraints.txt")
    folders = set()
    for text in ("numpy==1\n", "numpy==2\n"):
        (tmp_path / "constraints.txt").write_text(text)
        folders |= {ANY.folder, replace(ANY, torch="2.12.0").folder, replace(ANY, python="3.13").folder}
    assert len(folders) == 6


def test_what_was_not_made_to_its_end_is_made_again_and_what_is_old_goes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    for name in (ANY.folder.name, "any-of-old", "another-of-old"):
        (tmp_path / name).mkdir()
    assert not ANY.is_complete
    commands: list[list[object]] = []

    def run(command: list[object], check: bool) -> object:
        commands.append(command)
        ANY.folder.mkdir(exist_ok=True)
        return type("Ended", (), {"returncode": int(len(commands) == 2)})

    monkeypatch.setattr(environments.subprocess, "run", run)
    with pytest.raises(SystemExit, match=r"^oracles: pip could not install the environment any"):
        ANY.make()
    assert not ANY.is_complete
    ANY.make()
    assert ANY.is_complete
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another-of-old", ANY.folder.name]
    assert commands[0][:3] == [sys.executable, "-m", "venv"]
    assert "torch==2.13.0" in commands[1]


def test_a_python_of_pyenv_is_found_where_that_in_path_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scripts = {"bin/python3.99": "exit 127", "versions/3.99.1/bin/python": "echo 3.99"}
    for name, text in scripts.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert find_python("3.99") == str(tmp_path / "versions/3.99.1/bin/python")
    assert find_python("") == sys.executable


def test_a_python_that_nobody_has_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^oracles: there is no Python 3\.99 with venv in PATH or pyenv"):
        find_python("3.99")


def test_four_turns_make_each_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setattr(Environment, "is_complete", True)
    tested: list[str] = []
    monkeypatch.setattr(Environment, "test", lambda environment: tested.append(environment.name))
    for number in range(1, 5):
        monkeypatch.setattr(sys, "argv", ["environments", "--turn", f"{number}/4"])
        environments.main()
    assert tested == [environment.name for environment in ENVIRONMENTS]
    monkeypatch.setattr(sys, "argv", ["environments", "newst"])
    with pytest.raises(SystemExit, match=r"^oracles: newst: choose from oldest, megatron, newest$"):
        environments.main()

"""The installed commands, and the scripts of a clone that call the same functions."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megalite.commands import generate

ROOT = Path(__file__).parents[2]
SCRIPTS = [ROOT / "pretrain_gpt.py", *sorted((ROOT / "tools").rglob("*.py"))]
COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def test_each_script_is_a_command_too() -> None:
    calls = [re.findall(r"^from (megalite\.[\w.]+) import command$", path.read_text(), re.M) for path in SCRIPTS]
    assert all(len(call) == 1 for call in calls)
    assert sorted(f"{module}:command" for (module,) in calls) == sorted(COMMANDS.values())


def test_each_command_is_there() -> None:
    for name, place in COMMANDS.items():
        module, _, function = place.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
        assert name == f"megalite-{module.rpartition('.')[2].replace('_', '-')}"


@pytest.mark.parametrize(
    ("program", "examples"),
    [
        ("tools/generate.py", ["python tools/generate.py --load", "--nproc-per-node 4 tools/generate.py"]),
        ("/bin/megalite-generate", ["megalite-generate --load", "--nproc-per-node 4 --no-python megalite-generate"]),
    ],
    ids=["script", "command"],
)
def test_the_help_has_the_name_that_was_called(
    program: str, examples: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        generate.main()
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(f"usage: {program} ")
    for example in examples:
        assert example in shown


_FROM_A_CLONE = """
import importlib.util, runpy, sys
for script in sys.argv[1:]:
    before, modules = sys.path[:], set(sys.modules)
    sys.path.insert(0, script.rpartition("/")[0])
    runpy.run_path(script, run_name="tried")
    print(importlib.util.find_spec("megalite").origin, importlib.util.find_spec("megalite_kernels").origin)
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        if name.startswith("megalite"):
            del sys.modules[name]
"""


def test_scripts_run_from_a_clone_that_is_not_installed(tmp_path: Path) -> None:
    """In an interpreter that has what the project depends on, and ignores what says where the project is."""
    libraries = Path(str(importlib.import_module("numpy").__file__)).parents[1]
    command = [sys.executable, "-S", "-c", _FROM_A_CLONE, *map(str, SCRIPTS)]
    environment = {"PYTHONPATH": str(libraries)}
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    own = f"{ROOT / 'megalite/__init__.py'} {ROOT / 'kernels/megalite_kernels/__init__.py'}"
    assert ended.stdout.splitlines() == [own] * len(SCRIPTS)

"""The installed commands, and the scripts of a clone that call the same functions."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import megalite
from megalite.__main__ import commands
from megalite.commands import generate
from megalite.extras.planner import flags as planner_flags
from megalite.process import names
from tests.harness.tool import Ended, run_tool

ROOT = Path(__file__).parents[2]
SCRIPTS = [ROOT / "finetune_gpt.py", *sorted(ROOT.glob("pretrain_*.py")), *sorted((ROOT / "tools").rglob("*.py"))]
COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def test_each_script_is_a_command_too() -> None:
    calls = [re.findall(r"^from (megalite\.[\w.]+) import command$", path.read_text(), re.M) for path in SCRIPTS]
    assert all(len(call) == 1 for call in calls)
    assert {f"{module}:command" for (module,) in calls} == set(COMMANDS.values())


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


def test_the_package_lists_its_commands() -> None:
    assert commands().keys() == COMMANDS.keys()
    ended = subprocess.run([sys.executable, "-m", "megalite"], cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout.startswith(f"megalite {megalite.__version__}. Its commands")
    for name, what in commands().items():
        assert what.endswith("."), name
        assert f"  {name}\n      {what}\n" in ended.stdout


@pytest.mark.parametrize("command", [name.removeprefix("megalite-") for name in COMMANDS])
def test_each_command_says_its_version(command: str) -> None:
    assert run_tool(command, "--version") == Ended(0, f"megalite {megalite.__version__}\n", "")


@pytest.fixture
def in_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package believe that no clone is around it."""
    monkeypatch.setattr(names, "_ROOT", tmp_path)


@pytest.mark.usefixtures("in_a_wheel")
def test_each_script_has_the_name_of_its_command() -> None:
    for script in SCRIPTS:
        (module,) = re.findall(r"^from megalite\.([\w.]+) import command$", script.read_text(), re.M)
        command = "megalite-" + module.rpartition(".")[2].replace("_", "-")
        path = script.relative_to(ROOT)
        assert names.as_installed(f"run it:\n    python {path} --load a") == f"run it:\n    {command} --load a"
        assert names.as_installed(f"torchrun -n 2 {path} --load a") == f"torchrun -n 2 --no-python {command} --load a"
    assert names.as_installed("see docs/moe.md") == "see docs/moe.md of megalite's source"


@pytest.mark.usefixtures("in_a_wheel")
def test_files_of_a_person_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    others = "mine/docs/moe.md, my/pretrain_gpt.py, my-pretrain_gpt.py, tools/train_t5.py"
    assert names.as_installed(others) == others
    given = ["tools/translate.py", "pretrain_gpt.py", "docs/moe.md"]
    for path in given:
        monkeypatch.setattr(sys, "argv", ["megalite-translate", f"--file={path}"])
        assert [names.as_installed(each) == each for each in given] == [each == path for each in given]


@pytest.mark.usefixtures("in_a_wheel")
@pytest.mark.parametrize("command", [name.removeprefix("megalite-") for name in COMMANDS])
def test_the_help_of_a_wheel_names_only_what_it_has(command: str) -> None:
    shown = run_tool(command, "--help")
    assert shown.code == 0, shown.stderr
    assert not re.findall(r"tools/\S+|\w+\.py\b|\S+\.sbatch|docs/\w+\.md(?! of megalite's source)", shown.stdout)


@pytest.mark.usefixtures("in_a_wheel")
def test_the_planner_of_a_wheel_prints_commands_that_run_there() -> None:
    torchrun, srun = planner_flags.commands(["--num-layers", "2"], 2, 8)
    assert "--nproc-per-node 8 --no-python megalite-pretrain \\\n    --num-layers 2" in torchrun
    assert srun.startswith("srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 megalite-pretrain \\\n")


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

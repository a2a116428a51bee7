"""The wheel, installed into a new environment: its commands run outside the clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.end_to_end.runs import GPT2, MOCK, ROOT, iterations

LOOK = """
import sys
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import megalite, megalite_kernels

assert find_spec("megalite_trace").origin.startswith(sys.prefix)
for package in (megalite, megalite_kernels):
    assert Path(package.__file__).is_relative_to(sys.prefix), package.__file__
    assert Path(package.__file__).with_name("py.typed").exists()
commands = [entry for entry in distribution("megalite").entry_points if callable(entry.load())]
assert len(commands) > 5
assert all((Path(sys.prefix) / "bin" / entry.name).exists() for entry in commands)
assert "torch" not in sys.modules
missing = [name for name in sys.argv[1:] if not (Path(megalite.__file__).parent / name).exists()]
assert not missing, missing
"""


def run(command: object, *arguments: object, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a program without the variables that lead to this clone."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    argv = [str(command), *map(str, arguments)]
    return subprocess.run(
        argv, cwd=directory, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of programs in an environment with the wheel; its dependencies come from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: setuptools builds in the tree that it is given
    for name in ("megalite", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "megalite_trace.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    build = ("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, source)
    built = run(*pip, *build, directory=folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    put = run(*pip, "--python", python, "install", "--no-deps", "--no-index", "--no-compile", wheel, directory=folder)
    assert put.returncode == 0, put.stderr
    # Python ignores .pth files in a folder that a .pth file names, so an installed clone is not visible.
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    rest = {sysconfig.get_path(kind): None for kind in ("purelib", "platlib")}
    (packages / "rest.pth").write_text("\n".join(rest) + "\n")
    return python.parent


def test_both_packages_and_all_commands_are_in_it(programs: Path, tmp_path: Path) -> None:
    tables = [path.relative_to(ROOT / "megalite") for path in (ROOT / "megalite").rglob("*.toml")]
    assert tables
    looked = run(programs / "python", "-c", LOOK, *tables, directory=tmp_path)
    assert looked.returncode == 0, looked.stderr


@pytest.mark.wide  # the commands load and end with their codes above and below
def test_a_command_trains_outside_a_clone(programs: Path, tmp_path: Path) -> None:
    flags = (*MOCK, *GPT2, "--train-iters", 2, "--save", "run")
    trained = run(programs / "megalite-pretrain", *flags, directory=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.startswith("starting: 2 layers, hidden 16, on TP 1 x DP 1\n")
    assert (tmp_path / "run" / "DONE").exists()
    assert iterations(tmp_path / "run") == [1, 2]


@pytest.mark.wide
def test_a_command_ends_with_the_codes_of_its_script(programs: Path, tmp_path: Path) -> None:
    wrong = run(programs / "megalite-pretrain", "--hiden-size", 16, directory=tmp_path)
    assert wrong.returncode == 64
    assert wrong.stderr.startswith("error: unknown flag --hiden-size, did you mean --hidden-size?\n")
    helped = run(programs / "megalite-generate", "--help", directory=tmp_path)
    assert helped.returncode == 0
    assert "\nmegalite-generate --load" in "\n".join(map(str.strip, helped.stdout.splitlines()))

"""Environments of other Pythons and torches, beside the project's own: `make oracles` makes those that are missing.

They are kept in a folder of the machine, for all clones, and made again when what they contain changes. Run with any
Python of 3.11 or later; torch is not needed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.harness.turn import Turn

ROOT = Path(__file__).parents[1]
FOLDER = Path(os.environ.get("MEGALITE_ORACLES") or Path.home() / ".cache" / "megalite" / "oracles")
CONSTRAINTS = ROOT / "tests" / "constraints.txt"
TOOLS = ("pytest", "pytest-xdist", "hypothesis")
TESTED = (
    # Loss, gradients and logits of each network are the oracle's.
    "tests/unit/test_oracle.py",
    "tests/unit/test_parallel_model.py",
    # Compiled layers have the gradients of others.
    "tests/unit/test_compiled_gradients.py",
    "tests/distributed/test_compiled.py::test_every_layout_is_the_oracles_with_what_one_has_compiled",
    # Kernels, in Triton's interpreter and traced by torch.compile.
    "tests/kernels/test_norm.py",
    "tests/kernels/test_activation.py",
    "tests/kernels/test_rotary.py",
    "tests/kernels/test_tracing.py",
    # Folders that this torch's torch.distributed.checkpoint writes.
    "tests/unit/test_conversion_dcp.py::test_the_names_of_torchtitan_are_read",
    # What is not public in torch, and a step on the meta device.
    "tests/unit/test_torch_internals.py",
    "tests/extras/planner/test_dry_run.py::test_a_dry_run_in_bf16_adds_products",
    # Programs: on two ranks, resumed, and from a clone that is not installed.
    "tests/end_to_end/test_resume.py::test_a_run_resumed_under_another_layout_is_the_same_run[tp2-dp2zero1-llama]",
    "tests/unit/test_commands.py",
)
"""Tests that tell whether an environment works: one of each capability that another torch or Python has broken."""


@dataclass(frozen=True)
class Environment:
    """Environment `name`: a Python ("" is the one that runs this file), a torch, and packages of oracles."""

    name: str
    python: str
    torch: str
    packages: tuple[str, ...] = ()

    @property
    def requirements(self) -> list[str]:
        """Return what pip installs: this torch, and what the project and its tests need."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        others = (*(name for name in project if not name.startswith("torch")), *TOOLS, *self.packages)
        return [f"torch=={self.torch}", *others]

    @property
    def folder(self) -> Path:
        """Return where it is kept, under a name that says what it contains."""
        contents = "\n".join([self.python, *self.requirements, CONSTRAINTS.read_text()])
        return FOLDER / f"{self.name}-{hashlib.sha256(contents.encode()).hexdigest()[:12]}"

    @property
    def interpreter(self) -> Path:
        """Return its Python, whether or not it has been made."""
        return self.folder / "bin" / "python"

    @property
    def is_complete(self) -> bool:
        """Tell whether it has been made to its end."""
        return (self.folder / "complete").exists()

    def make(self) -> None:
        """Make it, and remove what is left of it under other names.

        Raises:
            SystemExit: there is no such Python, or pip failed.
        """
        for former in FOLDER.glob(f"{self.name}-*"):
            shutil.rmtree(former)
        subprocess.run([find_python(self.python), "-m", "venv", self.folder], check=True)
        pip = [self.interpreter, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        index = os.environ.get("TORCH_INDEX")
        torch, *others = self.requirements
        versions = self.folder / "constraints.txt"  # but for Triton: each torch brings its own
        versions.write_text("".join(line for line in CONSTRAINTS.open() if not line.startswith("triton==")))
        commands = [[*pip, "--index-url", index, torch]] if index else []
        commands.append([*pip, "--constraint", versions, torch, *others])
        for command in commands:
            if subprocess.run(command, check=False).returncode:
                sys.exit(f"oracles: pip could not install the environment {self.name}: see above")
        (self.folder / "complete").touch()

    def test(self) -> None:
        """Run the tests that tell whether megalite works in it.

        Raises:
            SystemExit: one failed.
        """
        pytest = [self.interpreter, "-m", "pytest", "--numprocesses=2", "--dist=load", "--durations=5"]
        commands = [[*pytest, "-m", "not slow and not slurm and not report", *TESTED]]
        if self.packages:
            commands.append([*pytest, "-m", "oracle", "tests/oracles"])
        if any(subprocess.run(command, cwd=ROOT, check=False).returncode for command in commands):
            sys.exit(f"oracles: tests fail with Python {self.python or 'of the project'} and torch {self.torch}")


ENVIRONMENTS = (
    Environment("oldest", "", "2.11.0"),
    Environment(
        "megatron", "3.12", "2.13.0", ("megatron-core==0.19.2", "tree-sitter", "tree-sitter-bash", "torchao==0.18.0")
    ),  # 3.12 or later
    Environment("newest", "3.13", "2.14.1"),
)


def find_python(version: str) -> str:
    """Return the command of a Python: of PATH, of pyenv, or one that uv installs.

    Raises:
        SystemExit: there is none, and uv could not install it.
    """
    if not version:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    installed = FOLDER / "pythons"
    install = [sys.executable, "-m", "uv", "python", "install", "--install-dir", installed, version]
    for attempt in range(2):
        if attempt:
            subprocess.run(install, check=False)
        found = [*pyenv.glob(f"{version}.*/bin/python"), *installed.glob(f"cpython-{version}.*/bin/python{version}")]
        for command in (f"python{version}", *map(str, found)):
            if _is_python(command, version):
                return command
    sys.exit(f"oracles: there is no Python {version} with venv in PATH or pyenv: install one")


def _is_python(command: str, version: str) -> bool:
    """Tell whether it runs: pyenv has commands in PATH for each version, and those that are not chosen fail."""
    if not shutil.which(command):
        return False
    program = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([command, "-c", program], capture_output=True, text=True).stdout.strip() == version


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Keep other processes of this machine from making environments meanwhile."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Make the environments that are missing, and run the tests of `TESTED` in each."""
    names = [environment.name for environment in ENVIRONMENTS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}, only these")
    parser.add_argument("--turn", type=Turn.parse, metavar="K/N", help="only the one whose turn it is")
    arguments = parser.parse_args()
    chosen = arguments.names or names
    if unknown := set(chosen) - set(names):
        sys.exit(f"oracles: {', '.join(sorted(unknown))}: choose from {', '.join(names)}")
    if arguments.turn is not None:
        chosen = chosen[arguments.turn.number - 1 :: arguments.turn.count]
    for environment in ENVIRONMENTS:
        if environment.name in chosen:
            begin = time.monotonic()
            with locked():
                if not environment.is_complete:
                    environment.make()
            print(f"{environment.name}: {environment.interpreter} ({time.monotonic() - begin:.0f} s)", flush=True)
            environment.test()


if __name__ == "__main__":
    main()

"""Plant faults one by one: `python -m tests.mutants [WORDS...] [--turn K/N]`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.harness.turn import Turn
from tests.mutants import FILES, ROOT, Mutant, mutants_of

FOLDERS = ("megalite", "kernels", "tests", "benchmarks", "tools", "examples", "slurm")
TESTS_FAILED = 1  # pytest's exit code; anything else but 0 is a broken run, which proves nothing
SECONDS = 600  # time limit for the tests that one mutant must fail; hypothesis also shrinks what fails
WORKERS = 3  # tests also wait: three at a time suit two cores


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("words", nargs="*", help="only mutants whose fault contains one of these")
    parser.add_argument(
        "--turn", type=Turn.parse, default=Turn(1, 1), metavar="K/N", help="only those whose turn it is"
    )
    arguments = parser.parse_args()
    words = arguments.words or [""]
    mutants = [mutant for file in FILES for mutant in mutants_of(file) if any(word in mutant.fault for word in words)]
    chosen = [mutant for mutant in mutants if arguments.turn.has(mutant.fault)]
    if not chosen:
        sys.exit("there is no such mutant")
    with tempfile.TemporaryDirectory(prefix="mutants_") as directory, ThreadPoolExecutor(WORKERS) as workers:
        whole = Path(directory) / "whole"
        for folder in FOLDERS:
            shutil.copytree(ROOT / folder, whole / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for file in ("pretrain_gpt.py", "pyproject.toml"):
            shutil.copy2(ROOT / file, whole)
        tests = sorted({mutant.test for mutant in chosen})
        shared = [f"--numprocesses={WORKERS}", "--dist=loadfile"] if len(tests) > WORKERS else []
        # What this compiles is linked into the trees of the mutants, but for the files that they change.
        if (result := _pytest(whole, *shared, *tests, seconds=SECONDS * len(tests))).returncode != 0:
            sys.exit(f"the named tests do not pass on the tree as it is\n{result.stdout}")
        verdicts = []
        for mutant, verdict in zip(chosen, workers.map(partial(_verdict, whole), chosen), strict=True):
            print(f"{verdict or 'caught':8}  {mutant.fault}  ({mutant.test})", flush=True)
            verdicts.append(verdict)
    if any(verdicts):
        sys.exit(f"{sum(map(bool, verdicts))} of {len(chosen)} mutants were not caught")
    print(f"all {len(chosen)} mutants were caught")


def _verdict(whole: Path, mutant: Mutant) -> str:
    """Empty where the named test fails on the mutant, else what happened."""
    with tempfile.TemporaryDirectory(dir=whole.parent) as directory:
        tree = shutil.copytree(whole, Path(directory) / "tree", copy_function=os.link)
        mutant.apply(tree)
        try:
            result = _pytest(tree, mutant.test)
        except subprocess.TimeoutExpired:
            return "HUNG"
    if result.returncode in (0, TESTS_FAILED):
        return "" if result.returncode else "SURVIVED"
    print(result.stdout, file=sys.stderr)
    return "BROKEN"


def _pytest(tree: Path, *arguments: str, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    """Run tests of a tree, whatever their marks. Raises subprocess.TimeoutExpired if they take longer."""
    command = [sys.executable, "-m", "pytest", "-x", "-m", "", "-p", "no:cacheprovider", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        command, cwd=tree, env=environment, timeout=seconds, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


if __name__ == "__main__":
    main()

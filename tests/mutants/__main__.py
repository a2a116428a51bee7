"""Plant faults one by one: `python -m tests.mutants [WORDS...] [--turn K/N]`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from tests.harness.turn import Turn
from tests.mutants import FILES, ROOT, Mutant, mutants_of

FOLDERS = ("megalite", "kernels", "tests", "benchmarks", "tools", "examples", "slurm")
TESTS_FAILED = 1  # pytest's exit code; anything else but 0 is a broken run, which proves nothing
SECONDS = 600  # time limit for the tests that one mutant must fail; hypothesis also shrinks what fails
OPTIONS = ("-x", "-m", "", "-p", "no:cacheprovider")  # whatever the marks of the tests
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
    with tempfile.TemporaryDirectory(prefix="mutants_") as directory:
        whole = Path(directory) / "whole"
        for folder in FOLDERS:
            shutil.copytree(ROOT / folder, whole / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for file in ("pretrain_gpt.py", "pyproject.toml"):
            shutil.copy2(ROOT / file, whole)
        _check_tests(whole, sorted({mutant.test for mutant in chosen}))
        verdicts = []
        with ThreadPoolExecutor(WORKERS) as workers, _servers() as servers:
            for mutant, verdict in zip(chosen, workers.map(partial(_verdict, whole, servers), chosen), strict=True):
                print(f"{verdict or 'caught':8}  {mutant.fault}  ({mutant.test})", flush=True)
                verdicts.append(verdict)
    if any(verdicts):
        sys.exit(f"{sum(map(bool, verdicts))} of {len(chosen)} mutants were not caught")
    print(f"all {len(chosen)} mutants were caught")


def _check_tests(whole: Path, tests: list[str]) -> None:
    """Exit unless the tests pass on the tree as it is.

    What they compile there is linked into the trees of the mutants, but for the files that those change.
    """
    workers = [f"--numprocesses={WORKERS}", "--dist=loadfile"] if len(tests) > WORKERS else []
    command = [sys.executable, "-m", "pytest", *OPTIONS, *workers, *tests]
    result = subprocess.run(
        command,
        cwd=whole,
        env=_environment(),
        timeout=SECONDS * len(tests),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if result.returncode != 0:
        sys.exit(f"the named tests do not pass on the tree as it is\n{result.stdout}")


def _verdict(whole: Path, servers: SimpleQueue[_Server], mutant: Mutant) -> str:
    """Empty where the named test fails on the mutant, else what happened."""
    with tempfile.TemporaryDirectory(dir=whole.parent) as directory:
        tree = shutil.copytree(whole, Path(directory) / "tree", copy_function=os.link)
        mutant.apply(tree)
        output = Path(directory) / "output"
        server = servers.get()
        try:
            code = server.run(tree, [*OPTIONS, mutant.test], output)
        except TimeoutError:
            server = _Server()
            return "HUNG"
        finally:
            servers.put(server)
        if code in (0, TESTS_FAILED):
            return "" if code else "SURVIVED"
        print(output.read_text(errors="replace"), file=sys.stderr)
        return "BROKEN"


class _Server:
    """Process of server.py: it runs pytest in a tree without importing torch once more."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("server.py")],
            env=_environment(),
            start_new_session=True,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, tree: Path, arguments: list[str], output: Path) -> int:
        """Return the exit code of pytest. Raises TimeoutError, and is of no more use, if it takes too long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        run = {"tree": str(tree), "arguments": arguments, "output": str(output)}
        print(json.dumps(run), file=self._process.stdin, flush=True)
        if not select.select([self._process.stdout], [], [], SECONDS)[0]:
            self.close()
            raise TimeoutError
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the server and what it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@contextmanager
def _servers() -> Iterator[SimpleQueue[_Server]]:
    """Yield a server for each worker to take and put back."""
    servers: SimpleQueue[_Server] = SimpleQueue()
    for _ in range(WORKERS):
        servers.put(_Server())
    try:
        yield servers
    finally:
        while not servers.empty():
            servers.get().close()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


if __name__ == "__main__":
    main()

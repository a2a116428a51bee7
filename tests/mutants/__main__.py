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
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue

from tests.harness.turn import Turn
from tests.mutants import FILES, ROOT, Mutant, mutants_of

FOLDERS = ("megalite", "kernels", "tests", "benchmarks", "tools", "examples", "slurm", "docs", "museum")
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
    # Those of the last rooms wait the longest: nothing is beside them if they come last.
    every = [mutant for file in reversed(FILES) for mutant in mutants_of(file)]
    mutants = [mutant for mutant in every if any(word in mutant.fault for word in words)]
    chosen = [mutant for mutant in mutants if arguments.turn.has(mutant.fault)]
    if not chosen:
        sys.exit("there is no such mutant")
    with tempfile.TemporaryDirectory(prefix="mutants_") as directory:
        whole = Path(directory) / "whole"
        for folder in FOLDERS:
            shutil.copytree(ROOT / folder, whole / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for file in ("pretrain_gpt.py", "finetune_gpt.py", "pyproject.toml"):
            shutil.copy2(ROOT / file, whole)
        verdicts = []
        with _servers() as servers, ThreadPoolExecutor(WORKERS) as workers:
            _check_tests(whole, chosen, servers, workers)
            found = workers.map(partial(_verdict, whole, servers), chosen)
            for mutant, (verdict, seconds) in zip(chosen, found, strict=True):
                print(f"{verdict or 'caught':8} {seconds:5.1f} s  {mutant.fault}  ({mutant.test})", flush=True)
                verdicts.append(verdict)
    if any(verdicts):
        sys.exit(f"{sum(map(bool, verdicts))} of {len(chosen)} mutants were not caught")
    print(f"all {len(chosen)} mutants were caught")


def _check_tests(whole: Path, chosen: list[Mutant], servers: _Servers, workers: ThreadPoolExecutor) -> None:
    """Exit unless the tests pass on the tree as it is, where they run as they do on a mutant.

    What they compile there is linked into the trees of the mutants, but for the files that those change.
    """
    tests = sorted({mutant.test for mutant in chosen})
    files = [list(group) for _, group in groupby(tests, key=lambda test: test.partition("::")[0])]
    outputs = [whole.parent / f"output_{number}" for number in range(len(files))]
    for code, output in zip(workers.map(partial(servers.run, whole), files, outputs), outputs, strict=True):
        if code != 0:
            sys.exit(f"the named tests do not pass on the tree as it is\n{output.read_text(errors='replace')}")


def _verdict(whole: Path, servers: _Servers, mutant: Mutant) -> tuple[str, float]:
    """Return nothing where the named test fails on the mutant, else what happened; and the seconds that it took."""
    begin = time.monotonic()
    return _run(whole, servers, mutant), time.monotonic() - begin


def _run(whole: Path, servers: _Servers, mutant: Mutant) -> str:
    with tempfile.TemporaryDirectory(dir=whole.parent) as directory:
        tree = shutil.copytree(whole, Path(directory) / "tree", copy_function=os.link)
        mutant.apply(tree)
        output = Path(directory) / "output"
        code = servers.run(tree, [mutant.test], output)
        if code is None:
            return "HUNG"
        if code in (0, TESTS_FAILED):
            return "" if code else "SURVIVED"
        print(output.read_text(errors="replace"), file=sys.stderr)
        return "BROKEN"


class _Servers:
    """Processes of server.py, which run pytest in a tree without importing torch once more."""

    def __init__(self) -> None:
        self._idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        self._all: list[subprocess.Popen[str]] = []
        for _ in range(WORKERS):
            self._start()

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        server = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("server.py")],
            env=environment,
            start_new_session=True,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._all.append(server)
        self._idle.put(server)

    def run(self, tree: Path, tests: list[str], output: Path) -> int | None:
        """Return the exit code of pytest, -1 if the server has ended with it; None if it took too long."""
        server = self._idle.get()
        assert server.stdin is not None
        assert server.stdout is not None
        run = {"tree": str(tree), "arguments": [*OPTIONS, *tests], "output": str(output)}
        print(json.dumps(run), file=server.stdin, flush=True)
        in_time = select.select([server.stdout], [], [], SECONDS)[0]
        if in_time and (code := server.stdout.readline()):
            self._idle.put(server)
            return int(code)
        _kill(server)
        self._start()
        return -1 if in_time else None

    def close(self) -> None:
        """End the servers and what they run."""
        for server in self._all:
            _kill(server)


def _kill(server: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@contextmanager
def _servers() -> Iterator[_Servers]:
    servers = _Servers()
    try:
        yield servers
    finally:
        servers.close()


if __name__ == "__main__":
    main()

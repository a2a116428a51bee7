"""Search for flaky tests: `make flakes` repeats the tests of processes, signals, sockets and time.

Each file runs ten times beside four busy processes. Two files run at a time, since tests wait. Each failure is shown
immediately, and the number of failures of each test at the end.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUSY, TIMES = 4, 10
"""Busy processes beside the tests, and runs of each file."""
AT_A_TIME = 2
SECONDS = 1800
"""Time limit for the tests of a file, which take a few minutes with busy processes: a test that hangs fails, too."""
CHOSEN = "not wide and not slow"
NOTHING_COLLECTED = 5
"""The exit code of pytest for a file whose tests are all others."""
DELICATE = re.compile(r"\b(spawn|subprocess|socket|os\.kill|SIG[A-Z]+|threading|Timeout|in_clean_process)\b")
"""Words in files that start processes, wait, kill or listen; all files of tests/end_to_end do."""


def delicate_files() -> list[str]:
    """Return the paths of such files, without those of tests/slurm, where SLURM determines the timing."""
    found = sorted((ROOT / "tests" / "end_to_end").glob("test_*.py"))
    for folder in ("distributed", "unit"):
        found += [p for p in sorted((ROOT / "tests" / folder).glob("test_*.py")) if DELICATE.search(p.read_text())]
    return [str(path.relative_to(ROOT)) for path in found]


@contextmanager
def load(count: int) -> Iterator[None]:
    """So many processes that take all the time they get."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def failures(file: str, report: Path) -> dict[str, str]:
    """Run the tests of a file once; returns the messages of those that failed, by name."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", CHOSEN, f"--junit-xml={report}", file]
    said = report.with_suffix(".txt")
    with said.open("wb") as output:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return {file: f"no end within {SECONDS} s\n{said.read_text(errors='replace')}"}
    if code == NOTHING_COLLECTED:
        return {}
    if code not in (0, 1):
        return {file: said.read_text(errors="replace")}
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        for problem in (*case.iter("failure"), *case.iter("error")):
            found[f"{file}::{case.get('name')}"] = problem.text or ""
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="of all that have processes or wait, only these")
    files = parser.parse_args().files or delicate_files()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="flakes_") as folder:

        def repeat(number: int) -> None:
            file, failed = files[number], 0
            for _ in range(TIMES):
                found = failures(file, Path(folder) / f"report{number}.xml")
                counts.update(found.keys())
                failed += len(found)
                for name, message in found.items():  # at once, for the whole takes hours
                    print(f"\n{name}\n{message}\n", flush=True)
            print(f"{file}: {failed} failures in {TIMES} runs beside {BUSY}", flush=True)

        with load(BUSY), ThreadPoolExecutor(AT_A_TIME) as pool:
            list(pool.map(repeat, range(len(files))))
    for name, count in counts.most_common():
        print(f"{count} of {TIMES}  {name}")
    sys.exit(bool(counts))


if __name__ == "__main__":
    main()

"""A program that is killed, and continues from copies in memory as it would from a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalite.process.launchers import MEMORY_FILES
from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN

STEPS = 150


def started(folder: Path, files: tuple[int, ...]) -> subprocess.Popen[str]:
    flags = [
        *MOCK,
        *GPT2,
        "--save",
        folder,
        "--resume",
        "auto",
        "--train-iters",
        STEPS,
        "--eval-iters",
        1,
        "--eval-interval",
        100,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop(MEMORY_FILES, None)
    if files:
        environment[MEMORY_FILES] = ",".join(map(str, files))
    return subprocess.Popen(
        [sys.executable, str(PRETRAIN), *map(str, flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        pass_fds=files,
    )


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[tuple[float, ...]]:
    names = ("iteration", "consumed_samples", "lm_loss", "validation_loss", "grad_norm")
    return [tuple(record.get(name, -1.0) for name in names) for record in records(folder)]


def test_a_killed_program_continues_from_memory(tmp_path: Path) -> None:
    """There is no checkpoint on disk. Each step is in the metrics once, with the numbers of a run without a kill."""
    files = tuple(os.memfd_create(f"slot {number}") for number in range(4))
    first = started(tmp_path / "a", files)
    path, until = tmp_path / "a" / "metrics.jsonl", time.monotonic() + 240
    while not path.exists() or path.read_text().count("\n") < 10:
        assert time.monotonic() < until
        assert first.poll() is None
        time.sleep(0.01)
    first.kill()
    first.communicate()
    second = started(tmp_path / "a", files)
    text, _ = second.communicate(timeout=240)
    assert second.returncode == 0, text
    assert "continues from the copies in memory of step" in text
    assert "copies in memory: every" in text
    whole = started(tmp_path / "b", ())
    text, _ = whole.communicate(timeout=240)
    assert whole.returncode == 0, text
    assert "in memory" not in text
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert any("memory_copy_s" in record for record in records(tmp_path / "a"))
    for number in files:
        os.close(number)


@pytest.mark.parametrize("folder", ["/dev/shm"])
def test_memory_files_do_not_count_against_the_size_of_shared_memory(folder: str) -> None:
    """The slots are larger than /dev/shm, which containers often limit to 64 MiB."""
    script = (
        f"mount -t tmpfs -o size=1m tmpfs {folder} && "
        f'{sys.executable} -c \'import os; n = os.memfd_create("s"); os.posix_fallocate(n, 0, 1 << 24); '
        "print(os.fstat(n).st_size)'"
    )
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)
    if done.returncode and "not permitted" in done.stderr:
        pytest.skip("needs root")
    assert done.stdout == "16777216\n", done.stderr

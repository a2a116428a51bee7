"""A program that is killed, and continues from copies in memory as it would from a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.extras.recovery.copies import memory_copies
from megalite.extras.recovery.generation import STATE
from megalite.parallel.mesh import ParallelMesh
from megalite.process.launchers import GENERATION, MEMORY_FILES
from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN

STEPS = 150


def started(folder: Path, files: tuple[int, ...], *more: str, **variables: str) -> subprocess.Popen[str]:
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
        *more,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    environment.pop(MEMORY_FILES, None)
    command = [sys.executable, str(PRETRAIN), *map(str, flags)]
    if files:  # the shell becomes the program, whose process ID the variable has
        numbers = ",".join(map(str, files))
        command = ["sh", "-c", f'export {MEMORY_FILES}="$$ {numbers}"; exec "$@"', "sh", *command]
    return subprocess.Popen(
        command,
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


def killed_and_continued(folder: Path, *more: str) -> str:
    """Run a program twice, and kill it the first time after ten steps. Returns what the second says."""
    files = tuple(os.memfd_create(f"slot {number}") for number in range(5))
    first = started(folder, files, *more)
    path, until = folder / "metrics.jsonl", time.monotonic() + 240
    while not path.exists() or path.read_text().count("\n") < 10:
        assert time.monotonic() < until
        assert first.poll() is None
        time.sleep(0.01)
    first.kill()
    first.communicate()
    second = started(folder, files, *more)
    text, _ = second.communicate(timeout=240)
    assert second.returncode == 0, text
    for number in files:
        os.close(number)
    return text


@pytest.mark.wide  # ranks that are started again do in test_warm_restart.py
def test_a_killed_program_continues_from_memory(tmp_path: Path) -> None:
    """There is no checkpoint on disk. Each step is in the metrics once, with the numbers of a run without a kill."""
    text = killed_and_continued(tmp_path / "a")
    assert "continues from the copies in memory of step" in text
    assert "copies in memory: every" in text
    whole = started(tmp_path / "b", ())
    text, _ = whole.communicate(timeout=240)
    assert whole.returncode == 0, text
    assert "in memory" not in text
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert any("memory_copy_s" in record for record in records(tmp_path / "a"))


@pytest.mark.wide
def test_a_fine_tuning_that_has_saved_nothing_continues_from_memory(tmp_path: Path) -> None:
    """The checkpoint on disk is another run's, whose steps say nothing about this one."""
    base = started(tmp_path / "base", (), "--exit-interval", "30")
    base.communicate(timeout=240)
    more = ("--load", str(tmp_path / "base"), "--finetune")
    text = killed_and_continued(tmp_path / "a", *more)
    assert "continues from the copies in memory of step" in text
    whole = started(tmp_path / "b", (), *more)
    text, _ = whole.communicate(timeout=240)
    assert "new, with the weights of" in text
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


@pytest.mark.wide
@pytest.mark.parametrize("others", [True, pytest.param(False, marks=pytest.mark.wide)])
def test_copies_older_than_a_damaged_checkpoint_are_used(others: bool, tmp_path: Path) -> None:
    """The newest checkpoint on disk is damaged; another one there is older than the copies, or there is none."""
    files, run = tuple(os.memfd_create(f"slot {number}") for number in range(5)), tmp_path / "run"
    state = json.dumps({"began": 0.0, "stop": None, "descriptor": -1, "process": 0})
    warm = ["--warm-restart", "--memory-checkpoint-interval", "1", "--exit-interval", "6"]
    warm += ["--save-interval", "3" if others else "6"]
    environment = {GENERATION: "1", STATE: state}
    text, _ = started(run, files, *warm, **environment).communicate(timeout=240)
    assert (run / "iter_0000003").exists() == others, text
    before = losses(run)
    (damaged,) = (run / "iter_0000006").glob("*.safetensors")
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    text, _ = started(run, files, *warm, **environment).communicate(timeout=240)
    assert "continues from the copies in memory of step 5" in text
    assert "WARNING: " in text
    assert str(damaged) in text
    assert losses(run) == before
    for number in files:
        os.close(number)


def test_a_program_that_a_rank_starts_does_not_take_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It inherits the variable, and maybe the files."""
    flags = [*MOCK, *GPT2, "--save", tmp_path, "--resume", "auto", "--train-iters", 4]
    config = resolve(parse_arguments(list(map(str, flags))).config, 1)
    files = [os.memfd_create(f"slot {number}") for number in range(5)]
    for process, taken in ((os.getpid(), True), (os.getppid(), False)):
        monkeypatch.setenv(MEMORY_FILES, f"{process} {','.join(map(str, files))}")
        assert (memory_copies(config, ParallelMesh(rank=0, world_size=1)) is not None) == taken
    for number in files:
        os.close(number)

"""The command that compares methods of synchronization: what it runs, lists and writes."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.extras.comparison.commands.compare_synchronization import MOCK_FLAGS, SMALL_MODEL

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "tools/compare_synchronization.py"]
TRAINING = [*SMALL_MODEL.split(), *MOCK_FLAGS.split()]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--output", str(folder), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)


@pytest.mark.wide
def test_methods_are_compared_and_those_that_fail_are_listed(tmp_path: Path) -> None:
    methods = ["--methods", "int8", "onebit-adam", "--steps", "3"]
    ran = run(tmp_path, *methods, "--", *TRAINING, "--use-distributed-optimizer")
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "comparison.json").read_text())
    plain, int8 = found["methods"]
    assert (plain["method"], int8["method"]) == ("plain", "int8")
    assert 1.5 < int8["fewer_bytes"] < 4  # weights are gathered as they are
    assert list(found["failed"]) == ["onebit-adam"]
    assert "onebit-adam failed: --gradient-compression onebit-adam compresses" in ran.stdout
    rows = list(csv.DictReader((tmp_path / "comparison.csv").open()))
    assert [(row["method"], row["step"]) for row in rows][2:4] == [("plain", "3"), ("int8", "1")]
    assert rows[0]["loss"] == rows[3]["loss"]
    assert (tmp_path / "comparison.svg").read_text().startswith("<svg")


def test_what_cannot_be_compared_is_an_error_of_the_person(tmp_path: Path) -> None:
    ran = run(tmp_path, "--methods", "none")
    assert (ran.returncode, ran.stdout) == (64, "")
    assert ran.stderr.startswith("error: --methods none: choose from plain,")


@pytest.mark.slow
def test_published_volumes_and_losses_come_out(tmp_path: Path) -> None:
    """1-bit Adam sends 1/(w + (1 - w)/16) of fp16 for a share w of warm-up, here 32 of fp32, and scales; PowerSGD of
    rank 4 loses less than 1 % at a fraction of the bytes."""
    ran = run(tmp_path, "--methods", "onebit-adam", "powersgd", "--steps", "300", "--", *TRAINING)
    assert ran.returncode == 0, ran.stderr
    plain, onebit, powersgd = json.loads((tmp_path / "comparison.json").read_text())["methods"]
    assert onebit["fewer_bytes"] == pytest.approx(1 / (0.2 + 0.8 / 32), rel=0.02)
    assert powersgd["fewer_bytes"] > 12
    assert powersgd["loss"] < 1.01 * plain["loss"]

"""A program of one's own whose ranks are started again: it runs from its start, and continues where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.runs import ROOT, metrics
from tests.extras.recovery import processes
from tests.extras.recovery.processes import kill
from tests.harness.job import Job

PROGRAM = ROOT / "tests" / "end_to_end" / "own_program.py"


@pytest.mark.wide
def test_a_program_of_ones_own_goes_on(tmp_path: Path) -> None:
    flags = ["--steps", "400", "--save-interval", "50", "--zero", "1"]
    with Job([PROGRAM, *flags, "--save", tmp_path / "run", "--warm"], 2, tmp_path / "job") as job:
        job.wait_for_output(0, "step ")
        kill(processes.ranks(job)[1])
        job.wait_for_output(0, "\ngeneration 2: rank 1 on ")
        assert job.wait(120.0) == [0, 0], job.stderr(0)
        assert job.stdout(0).count("the program goes on") == 1
    with Job([PROGRAM, *flags, "--save", tmp_path / "whole"], 2, tmp_path / "whole_job") as job:
        assert job.wait(120.0) == [0, 0], job.stderr(0)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert (tmp_path / "run" / "DONE").exists()


@pytest.mark.wide
def test_a_program_of_ones_own_that_fails_again_and_again_is_given_up(tmp_path: Path) -> None:
    flags = ["--steps", "40", "--save", tmp_path / "run", "--warm", "--broken-loss", "1", "3"]
    with Job([PROGRAM, *flags], 2, tmp_path / "job") as job:
        assert job.wait(120.0) == [93, 93], job.stderr(0)
        assert "error: 3 generations " in job.stderr(0)
        assert "the loss is broken" in job.stderr(1)

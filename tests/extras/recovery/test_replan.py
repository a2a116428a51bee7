"""Runs whose nodes hold no replica any more go on in another layout, which the planner chooses: the same losses."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, metrics, words
from tests.extras.recovery.nodes import RANKS, nodes
from tests.extras.recovery.processes import until
from tests.extras.recovery.test_elastic import WARM, steps
from tests.harness.close import assert_number_close
from tests.harness.job import Job

FLAGS = (
    *MOCK, *GPT2, *words("--num-layers 4 --global-batch-size 8 --lr-decay-style constant --fp64"),
    *words("--train-iters 100000 --save-interval 1000 --use-distributed-optimizer"),
)  # fmt: skip
HEADS_AND_STAGES = words("--tp 2 --sequence-parallel --pp 2")


def assert_undisturbed(folder: Path, flags: tuple[str, ...], ranks: int) -> None:
    """Compare with a run on so many ranks that was not disturbed."""
    flags = (*FLAGS, *flags, "--exit-interval", str(steps(folder)), "--save", str(folder / "whole"))
    with Job([PRETRAIN, *flags], ranks, folder / "job") as job:
        assert job.wait() == [85] * ranks, job.stderr(0)
    ours, theirs = metrics(folder / "run"), metrics(folder / "whole")
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["consumed_samples"] == other["consumed_samples"]
        for name in ("lm_loss", "grad_norm"):  # another layout adds in another order
            assert_number_close(mine[name], other[name], name)


@pytest.mark.wide
def test_a_run_goes_on_in_another_layout_and_in_its_own_once_the_nodes_are_back(tmp_path: Path) -> None:
    """A replica needs two nodes. Copies in memory go from 4 ranks to 2 of another layout, and back."""
    flags = [*FLAGS, *HEADS_AND_STAGES, "--save", tmp_path / "run", *WARM, "--elastic-replan"]
    with nodes(2, tmp_path, flags) as (first, second):
        until(lambda: steps(tmp_path) >= 6, "no step", 120.0)
        second.lose(signal.SIGSTOP)
        first.wait_for("\ngeneration 2: n1 (ranks 2, 3) does not answer any more; 2 ranks instead of 4, on n0; ", 180.0)
        assert "instead of TP 2 with SP x PP 2 x DP 1 (--tensor-model-parallel-size 1 " in first.said()
        before = steps(tmp_path)
        until(lambda: steps(tmp_path) >= before + 6, "no step", 90.0)
        second.lose(signal.SIGCONT)
        first.wait_for(
            "\ngeneration 3: n1 is back; 4 ranks instead of 2, on n0, n1; the layout is that of the flags again; went"
        )
        before = steps(tmp_path)
        until(lambda: steps(tmp_path) >= before + 3, "no step", 90.0)
        for ranks in (4, 2):
            assert f"(of {ranks} ranks, sent to those that need them now)" in first.said()
        (tmp_path / "run" / "STOP").touch()
        assert first.launcher.wait(90) == 85, first.said()
        print(first.said())
    assert_undisturbed(tmp_path, (), RANKS)

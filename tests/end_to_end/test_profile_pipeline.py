"""--profile-pipeline writes one step's time line of all pipeline ranks, and changes nothing else."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

from megalite.pipeline.trace import read_trace
from tests.end_to_end.runs import GPT2, NO_DROPOUT, Run, losses, words

PIPELINE = words("--pp 2 --pipeline-schedule zb-v --num-layers 4 --micro-batch-size 1")


def test_the_time_line_of_a_step(run: Run, tmp_path: Path) -> None:
    flags = (*GPT2, *PIPELINE, *NO_DROPOUT, "--fp64", "--train-iters", 3)
    run(*flags, "--save", tmp_path / "plain", world_size=2)
    run(*flags, "--profile-pipeline", 2, "--save", tmp_path / "profiled", world_size=2)
    assert losses(tmp_path / "profiled") == losses(tmp_path / "plain")
    written = {path.name for path in (tmp_path / "profiled").glob("pipeline_step_*")}
    assert written == {"pipeline_step_000002.html", "pipeline_step_000002.json"}
    time_line = read_trace(tmp_path / "profiled" / "pipeline_step_000002.json")
    assert time_line.in_seconds
    for spans in time_line.computation:
        assert Counter(span.action.kind for span in spans) == {"F": 8, "I": 8, "W": 8}
        assert all(before.end <= after.start for before, after in pairwise(spans))


def test_a_step_that_has_gone_by_is_told(run: Run, tmp_path: Path) -> None:
    flags = (*GPT2, *PIPELINE, "--save", tmp_path / "run", "--profile-pipeline", 2, "--resume", "auto")
    assert "changes nothing" not in run(*flags, "--train-iters", 2, world_size=2).stdout
    told = "--profile-pipeline 2: changes nothing, since the run goes on after step 2"
    assert told in run(*flags, "--train-iters", 4, world_size=2).stdout

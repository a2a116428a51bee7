"""At regular intervals a run reports where its ranks spend their time, and which rank the others wait for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.end_to_end.runs import GPT2, MOCK, Run, ended
from tests.harness.job import Job

SLOW_RANK = """
import os, time
from megalite.pipeline.engine import PipelineEngine
from megalite.lifecycle.failure import run_main
from megalite.commands.pretrain import main
run = PipelineEngine.run
def slow(*arguments):
    time.sleep(0.2 if os.environ["RANK"] == "2" else 0.0)
    return run(*arguments)
PipelineEngine.run = slow
run_main(main)
"""


def test_the_rank_that_the_others_wait_for_is_named(spawn: Callable[..., Job], tmp_path: Path) -> None:
    entry = tmp_path / "entry.py"
    entry.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n{SLOW_RANK}")
    flags = [*MOCK, *GPT2, "--tp", 2, "--train-iters", 5, "--timing-interval", 4, "--save", tmp_path / "run"]
    out = ended(spawn([entry, *flags], 4)).stdout
    assert out.count("ms per step") == 1
    assert "; slowest: rank 2 on " in out
    assert out.count("most of the difference in forward and backward") == 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    slowest = [line.get("iteration_time_s/slowest_rank") for line in lines if "lm_loss" in line]
    assert slowest == [None, None, None, 2.0, None]
    assert f"megalite-report {tmp_path / 'run'}" in out
    assert "  of the time " in out
    steps = [line for line in lines if "lm_loss" in line]
    assert ["start_time_s" in line for line in steps] == [True, False, False, False, False]
    for line in steps:
        assert sum(line[f"bytes_sent/{axis}"] for axis in ("tp", "dp", "world")) == line["bytes_sent"]
    assert steps[3]["wait_s/tp/max_rank"] == 3.0  # the peer of the slow rank
    assert steps[3]["wait_s/tp/max"] > 0.1


def test_no_interval_tells_nothing(run: Run) -> None:
    assert "ms per step" not in run(*GPT2, "--train-iters", 2, "--timing-interval", 0).stdout

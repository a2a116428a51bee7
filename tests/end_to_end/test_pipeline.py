"""The program on a pipeline: ranks that die or fail during a step, time lines, stopping and resuming."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from megalite.pipeline.stages import Stages
from megalite.pipeline.trace import read_trace
from tests.end_to_end.runs import (
    GPT2,
    MOCK,
    NO_DROPOUT,
    PRETRAIN,
    ROOT,
    Run,
    Start,
    assert_same_checkpoint,
    ended,
    iterations,
    latest_iteration,
    losses,
    metrics,
    saved_tensors,
    words,
)
from tests.harness.close import assert_parameter_close
from tests.harness.job import Job

Spawn = Callable[..., Job]
FOUR_LAYERS = (*GPT2, "--num-layers", "4", "--micro-batch-size", "1")

FAILS = """
import os, runpy, signal, sys, time
import torch
from megalite.model.gpt import GPT
from megalite.parallel.stage import StageOutput

forward, calls = GPT.forward, 0

def failing(self, inputs, micro_batch):
    global calls
    calls += 1
    if os.environ["RANK"] == os.environ["FAILING"] and calls == {call}:  # the first is the summary's
        {fault}
    return forward(self, inputs, micro_batch)

GPT.forward = failing
sys.argv[0] = {program!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start_failing(
    spawn: Spawn, directory: Path, fault: str, rank: int, *flags: str, call: int = 7, world_size: int = 3
) -> Job:
    """Start a run with four micro-batches per step; a rank fails in one of the second step."""
    entry = directory / "entry.py"
    entry.write_text(FAILS.format(fault=fault, call=call, program=str(PRETRAIN)))
    return spawn([entry, *MOCK, *FOUR_LAYERS, *flags, "--train-iters", "5"], world_size, FAILING=str(rank))


KILLED = [
    pytest.param("--pp 3 --decoder-first-pipeline-num-layers 2", 0, 3, "stage 1, ", marks=pytest.mark.wide),
    ("--pp 3 --decoder-first-pipeline-num-layers 2", 1, 3, "stage [02], "),
    pytest.param("--pp 4 --pipeline-schedule zb-h1", 3, 4, "stage 2, ", marks=pytest.mark.wide),
    pytest.param("--pp 4 --pipeline-schedule gpipe", 2, 4, "stage [13], ", marks=pytest.mark.wide),
]


@pytest.mark.wide
@pytest.mark.parametrize(("flags", "rank", "ranks", "stage"), KILLED)
def test_a_rank_that_is_killed_ends_the_others(
    flags: str, rank: int, ranks: int, stage: str, spawn: Spawn, tmp_path: Path
) -> None:
    """Another rank reports which stage waited for what; the watchdog would first report which rank died."""
    kill = "time.sleep(1.0), os.kill(os.getpid(), signal.SIGKILL)"  # the others have reached their wait
    job = start_failing(spawn, tmp_path, kill, rank, *words(flags), "--no-watchdog", world_size=ranks)
    codes = job.wait(timeout=60)
    assert codes == [-signal.SIGKILL if number == rank else 85 for number in range(ranks)]
    (error,) = errors(job)
    assert_names(error, stage)


@pytest.mark.wide  # as with the stages above
def test_a_rank_that_is_killed_ends_the_others_of_its_ring(spawn: Spawn, tmp_path: Path) -> None:
    """The message names the round, and the rank whose keys, values or gradients were waited for."""
    kill = "time.sleep(1.0), os.kill(os.getpid(), signal.SIGKILL)"
    job = start_failing(spawn, tmp_path, kill, 2, "--cp", "4", "--no-watchdog", world_size=4)
    codes = job.wait(timeout=60)
    assert codes == [85, 85, -signal.SIGKILL, 85]
    (error,) = errors(job)
    what = "(gradients of )?keys and values"
    assert re.search(rf"context parallelism, round \d of 4: waited for {what} from rank \d: ", error), error
    assert "another rank has ended" in error


def errors(job: Job) -> list[str]:
    """Return the stderr of all ranks together."""
    lines = "".join(job.stderr(rank) for rank in range(job.world_size)).splitlines()
    assert not any("Traceback" in line for line in lines), "\n".join(lines)
    return [line for line in lines if line.startswith("error")]


def assert_names(error: str, stage: str) -> None:
    """Assert that the error names the stage and the action that was waited for."""
    assert re.search(rf"{stage}.* of micro-batch \d, chunk 0.*: waited ", error), error
    assert "another rank has ended" in error


@pytest.mark.wide
def test_a_stage_that_returns_another_shape_is_told_once(spawn: Spawn, tmp_path: Path) -> None:
    narrow = "{name: tensor[:, :, :8] for name, tensor in forward(self, inputs, micro_batch).tensors.items()}"
    fault = f"return StageOutput({narrow})"
    job = start_failing(spawn, tmp_path, fault, 1, "--pp", "3", "--decoder-first-pipeline-num-layers", "2")
    codes = job.wait(timeout=60)
    assert errors(job) == [
        "error on rank 1: stage 1 returned hidden states (16, 1, 8) of torch.float32 for micro-batch 1, but the next "
        "stage expects (16, 1, 16) of torch.float32: let samples have one shape (padded in collate), and stages one "
        "dtype"
    ]
    assert len(set(codes)) == 1
    assert codes[0] not in (0, 85)


# ------------------------------------------------------------------------------------------------ the time line

PIPELINES = {
    "interleaved": ("--pp 2 --num-virtual-stages-per-pipeline-rank 2", 2, Stages(2, 2)),
    "zb-v": ("--pp 2 --pipeline-schedule zb-v", 2, Stages(2, 2, v_shaped=True)),
    "sequence parallel": ("--pp 2 --tp 2 --sequence-parallel", 4, Stages(2)),
}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("flags", "world_size", "stages"),
    [
        pytest.param(*each, id=name, marks=() if name == "zb-v" else pytest.mark.wide)
        for name, each in PIPELINES.items()
    ],
)
def test_the_time_line_of_a_step_is_written_and_can_be_drawn_again(
    flags: str, world_size: int, stages: Stages, run: Run, spawn: Spawn, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    profiled = ["--train-iters", 3, "--save", directory, "--profile-pipeline", 2]
    run(*FOUR_LAYERS, *words(flags), *profiled, world_size=world_size)
    assert iterations(directory) == [1, 2, 3]
    assert min(losses(directory)) > 1.0
    written = sorted(path.name for path in directory.glob("pipeline_step_*"))
    assert written == ["pipeline_step_000002.html", "pipeline_step_000002.json"]
    time_line = read_trace(directory / "pipeline_step_000002.json")
    assert time_line.in_seconds
    assert time_line.stages == stages
    assert sum(time_line.blocks) == 4 + 2  # four layers, the embedding and the head
    assert len(time_line.blocks) == stages.count
    assert time_line.micro_batches == 4
    assert {span.action.kind for rank in time_line.spans for span in rank} >= {"F", "R", "send F", "free B"}
    for spans in time_line.computation:
        kinds = ("F", "I", "W") if stages.v_shaped else ("F", "B")
        assert Counter(span.action.kind for span in spans) == dict.fromkeys(kinds, 4 * stages.chunks)
        assert all(before.end <= after.start for before, after in pairwise(spans))
    output = tmp_path / "again.svg"
    command = [ROOT / "tools" / "draw_schedule.py", "--measured", directory / written[1], "--output", output]
    ended(spawn(command, 1))
    assert output.read_text().startswith("<svg")


@pytest.mark.wide
def test_a_time_line_changes_nothing_else_and_one_of_a_step_that_has_gone_by_is_told(run: Run, tmp_path: Path) -> None:
    flags, world_size, _ = PIPELINES["zb-v"]
    course = (*FOUR_LAYERS, *words(flags), "--fp64", "--lr-decay-style", "constant", "--resume", "auto")
    profiled = (*course, "--save", tmp_path / "profiled", "--profile-pipeline", 2)
    told = "--profile-pipeline 2: changes nothing, since the run continues after step 2"
    assert "changes nothing" not in run(*profiled, "--train-iters", 2, world_size=world_size).stdout
    assert told in run(*profiled, "--train-iters", 3, world_size=world_size).stdout
    run(*course, "--save", tmp_path / "plain", "--train-iters", 3, world_size=world_size)
    assert losses(tmp_path / "profiled") == losses(tmp_path / "plain")


@pytest.mark.wide
def test_a_time_line_that_cannot_be_written_is_told_and_training_goes_on(run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    (directory / "pipeline_step_000001.html").mkdir(parents=True)
    flags = ["--pp", 2, "--train-iters", 2, "--save", directory, "--profile-pipeline", 1]
    told = run(*FOUR_LAYERS, *flags, world_size=2).stdout
    where = directory / "pipeline_step_000001.html"
    assert f"\nWARNING: the time line of step 1 is not in {directory}: {where} is no regular file" in told


# ------------------------------------------------------------------------------------------------ stopping and going on

EIGHT_LAYERS = (*GPT2, *NO_DROPOUT, "--num-layers", "8", "--micro-batch-size", "1", "--fp64")
EVALUATED = words("--eval-iters 1 --eval-interval 2 --lr-decay-style constant")
LAYOUTS = {
    "one": (1, ""),
    "tp2": (2, "--tp 2"),
    "pp2 interleaved": (2, "--pp 2 --num-virtual-stages-per-pipeline-rank 2"),
    "pp4 zb-v": (4, "--pp 4 --pipeline-schedule zb-v"),
    "pp2 dp2 zero 3": (4, "--pp 2 --data-parallel-sharding-strategy optim_grads_params"),
}
CHANGES = [
    ("pp2 interleaved", "tp2"),
    pytest.param("pp4 zb-v", "one", marks=pytest.mark.wide),
    pytest.param("one", "pp2 dp2 zero 3", marks=pytest.mark.wide),
]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_run_resumed_on_another_pipeline_is_the_same_run(before: str, after: str, run: Run, tmp_path: Path) -> None:
    """I9, for the results of evaluations, too."""
    flags = [*EIGHT_LAYERS, *EVALUATED, "--train-iters", 4, "--hidden-dropout", 0.1, "--attention-dropout", 0.1]
    whole = tmp_path / "whole"
    run(*flags, "--save", whole)
    directory = tmp_path / f"{before} to {after}"
    for layout, more, code in ((before, ["--exit-interval", 2], 85), (after, ["--resume", "auto"], 0)):
        world_size, layout_flags = LAYOUTS[layout]
        run(*flags, *words(layout_flags), *more, "--save", directory, world_size=world_size, expected=code)
    for line, wanted in zip(metrics(directory), metrics(whole), strict=True):
        assert {figure for figure in line.keys() ^ wanted.keys() if not figure.startswith("bytes_sent/")} == set()
        for figure, value in wanted.items():
            if figure.startswith("bytes_sent"):  # which the layout decides
                continue
            assert line[figure] == pytest.approx(value, rel=1e-10), (line["iteration"], figure)
    expected = saved_tensors(whole / "iter_0000004")
    for tensor, values in saved_tensors(directory / "iter_0000004").items():
        assert_parameter_close(values, expected[tensor], learning_rate=1e-2, name=tensor)


@pytest.mark.bits
@pytest.mark.parametrize("layout", [pytest.param("pp2 interleaved", marks=pytest.mark.wide), "pp4 zb-v"])
def test_an_interrupted_pipeline_goes_on_to_the_bit(layout: str, start: Start, run: Run, tmp_path: Path) -> None:
    """I8, after Ctrl-C on all ranks."""
    world_size, layout_flags = LAYOUTS[layout]
    flags = [*EIGHT_LAYERS, *EVALUATED, *words(layout_flags), "--hidden-dropout", 0.1]
    directory, whole = tmp_path / "broken", tmp_path / "whole"
    job = start(*flags, "--train-iters", 10000, "--save", directory, world_size=world_size)
    job.wait_for_output(0, "step     2/10000")
    job.kill_all(signal.SIGINT)
    assert "stopped after step" in ended(job, expected=85).stdout
    last = latest_iteration(directory) + 2
    run(*flags, "--train-iters", last, "--save", directory, "--resume", "auto", world_size=world_size)
    run(*flags, "--train-iters", last, "--save", whole, world_size=world_size)
    assert_same_checkpoint(directory / f"iter_{last:07d}", whole / f"iter_{last:07d}")
    interrupted = [line for line in metrics(directory) if "lm_loss" in line]
    assert interrupted == [line for line in metrics(whole) if "lm_loss" in line]

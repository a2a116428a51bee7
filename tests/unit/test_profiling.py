"""Features of GPUs, with stand-ins: ranges for nsys, and snapshots of memory."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config import RunConfig, parse_arguments
from megalite.parallel.mesh import ParallelMesh
from megalite.training.display import Display
from megalite.training.profiling import Profiler, record_memory_history
from megalite.watchdog.sections import Sections

MINIMAL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1 --lr 0.1 "
    "--log-interval 2"
)


def config(flags: str) -> RunConfig:
    return parse_arguments(f"{MINIMAL} {flags}".split()).config


def steps(run: RunConfig, rank: int, step: Callable[[int], Any], last: int = 5) -> None:
    mesh = ParallelMesh(rank=rank, world_size=1)
    profiler = Profiler(run, mesh, Display(last, 1, enabled=False), Sections(), 0)
    for number in range(1, last + 1):
        with profiler.step(number):
            step(number)


@pytest.mark.parametrize(("last", "told"), [(0, True), (3, True), (5, False)])
def test_a_profile_that_the_end_of_the_run_cuts_off_is_told(last: int, told: bool) -> None:
    """Asked for after the first step, so that steps 3 to 5 would be in it."""
    stream = io.StringIO()
    display = Display(9, 1, stream=stream)
    profiler = Profiler(config("--profile-ranks 1"), ParallelMesh(rank=0, world_size=1), display, Sections(), 0)
    profiler.ask(1)
    for number in range(2, last + 1):
        with profiler.step(number):
            pass
    profiler.finish()
    lost = "the profile of steps 3 to 5 is lost: the run ends before them"
    assert (lost in stream.getvalue().splitlines()) == told


def test_nsys_sees_the_chosen_steps_with_their_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def ranges(record_shapes: bool) -> nullcontext[None]:
        done.append(record_shapes)
        return nullcontext()

    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: done.append("on"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: done.append("off"))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", ranges)
    flags = "--profile --profile-step-start 2 --profile-step-end 4 --record-shapes"
    steps(config(flags), 0, done.append)
    assert done == [1, 2, "on", True, 3, 4, "off", 5]


def test_snapshots_of_memory_are_of_chosen_ranks_and_of_one_that_has_too_little(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    observers: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda max_entries: None)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    path = tmp_path / "memory" / "snapshot.pickle"
    run = config(f"--record-memory-history --memory-snapshot-path {path}")
    record_memory_history(run.profiling, 1)
    steps(run, 1, lambda number: None)
    assert not path.parent.exists()
    observers[0](0, 1, 2, 3)
    assert [file.name for file in path.parent.iterdir()] == ["snapshot_out_of_memory_rank_1.pickle"]
    seen: list[bool] = []
    steps(run, 0, lambda number: seen.append((path.parent / "snapshot_rank_0.pickle").exists()))
    assert seen == [False, False, True, True, True]

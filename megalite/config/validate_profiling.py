"""Relations between the flags of profiles."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.checkpoint import is_url
from megalite.config.profiling import ProfilingConfig
from megalite.config.run import RunConfig


def profiling_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """A line for each relation that does not hold."""
    profiling, save = config.profiling, config.checkpoint.save
    step, last = profiling.profile_pipeline, config.training.train_iters
    if step is not None and save is None:
        yield f"--profile-pipeline {step} needs --save, the run directory"
    elif step is not None and save is not None and is_url(save):
        yield f"--profile-pipeline {step} writes files into --save, which must be a folder, not {save}"
    if step is not None and last is not None and step > last:
        yield f"--profile-pipeline {step} is beyond --train-iters {last}"
    if not profiling.profile_ranks:
        yield "--profile-ranks names no rank"
    for rank in profiling.profile_ranks:
        if not 0 <= rank < world_size:
            yield f"--profile-ranks {rank}: there are ranks 0 to {world_size - 1}"
    if profiling.profile:
        yield from _steps(profiling, last)
        if profiling.use_pytorch_profiler and save is None and config.logging.tensorboard_dir is None:
            yield "--use-pytorch-profiler needs --save or --tensorboard-dir, where the traces go"
    yield from _idle(profiling, by_file=save is not None)


def _steps(profiling: ProfilingConfig, last: int | None) -> Iterator[str]:
    start, end = profiling.profile_step_start, profiling.profile_step_end
    if end <= start:
        yield f"--profile-step-end {end} is not after --profile-step-start {start}"
    elif last is not None and end > last:
        yield f"--profile-step-end {end} is beyond --train-iters {last}"


def _idle(profiling: ProfilingConfig, *, by_file: bool) -> Iterator[str]:
    """Flags that nothing reads; `by_file`: a trace may be asked for by DIR/PROFILE."""
    by_torch, nsys = profiling.profile and profiling.use_pytorch_profiler, profiling.profile
    traces = by_torch or by_file
    needs = {
        "use_pytorch_profiler": (profiling.profile, "--profile"),
        "profile_step_start": (profiling.profile, "--profile"),
        "profile_step_end": (profiling.profile, "--profile"),
        "profile_ranks": (profiling.profile or by_file or profiling.record_memory_history, "--profile or --save"),
        "pytorch_profiler_collect_shapes": (traces, "--profile --use-pytorch-profiler, or --save"),
        "pytorch_profiler_collect_callstack": (traces, "--profile --use-pytorch-profiler, or --save"),
        "record_shapes": (nsys and not by_torch, "--profile without --use-pytorch-profiler, which is for nsys"),
        "memory_snapshot_path": (profiling.record_memory_history, "--record-memory-history"),
    }
    for name, (given, needed) in needs.items():
        if not given and getattr(profiling, name) != getattr(ProfilingConfig, name):
            yield f"--{name.replace('_', '-')} needs {needed}"

"""Options of logging, profiling and the watchdog."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from megalite.config.checkpoint import is_url
from megalite.config.fields import NonNegativeInt, PositiveFloat, PositiveInt, needs
from megalite.config.parallel import ParallelConfig
from megalite.config.synchronization import SynchronizationConfig


@dataclass(frozen=True)
class LoggingConfig:
    """Options of logging: where and how often numbers are reported."""

    log_interval: PositiveInt = 100
    """Steps between lines on the screen."""
    metrics_path: str | None = None
    """File with one JSON object per step; unset: metrics.jsonl in the run directory."""
    log_params_norm: bool = False
    """Record in every step the norm of all parameters, and for each group of parameters the norms of parameters and
    gradients."""
    log_num_zeros_in_grad: bool = False
    """Record in every step how many elements of the gradient are zero."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard events."""
    tensorboard_log_interval: PositiveInt = 1
    """Steps between two that are written to TensorBoard."""
    log_loss_scale_to_tensorboard: bool = True
    """Write the loss scale to TensorBoard, too."""
    log_validation_ppl_to_tensorboard: bool = False
    """Record the perplexity of evaluations, too."""
    log_world_size_to_tensorboard: bool = False
    """Record the number of ranks in every step."""
    report: bool = True
    """Write report.html, loss.svg and loss.png into the run directory when the run ends."""
    sample_interval: PositiveInt | None = None
    """Steps between texts that the network writes, which the screen, the records and the report show; unset: none."""
    sample_prompts: tuple[str, ...] = ()
    """Beginnings of these texts; unset: one text, from the beginning of a document on."""
    sample_tokens: PositiveInt = 64
    """Most tokens that the network adds to each of them."""
    memory_monitor: bool = False
    """Record the memory of ranks by kind and what it grows by, and name a rank whose memory grows with each step."""
    performance_monitor: bool = False
    """Show every timing-interval steps what share of a step sections, waits and communication by axis take."""
    performance_plan: str | None = None
    """Cluster, as megalite-plan --cluster has it, whose plan of this run the performance monitor compares with."""


@dataclass(frozen=True)
class ProfilingConfig:
    """Options of profiling chosen steps. Without any flag, `touch DIR/PROFILE` makes a run trace its next steps."""

    profile: bool = False
    """Profile steps profile-step-start + 1 to profile-step-end, by nsys or (use-pytorch-profiler) by torch."""
    use_pytorch_profiler: bool = False
    """Let profile write traces by torch's profiler, into the run directory, or else into tensorboard-dir."""
    profile_step_start: NonNegativeInt = 10
    """Profile the steps after this one."""
    profile_step_end: PositiveInt = 12
    """The last step that is profiled."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that are profiled."""
    pytorch_profiler_collect_shapes: bool = False
    """Record the shapes of operands in traces."""
    pytorch_profiler_collect_callstack: bool = False
    """Record the Python call stacks of operations in traces."""
    record_shapes: bool = False
    """Record the shapes of operands for nsys."""
    record_memory_history: bool = False
    """Record allocations and frees of CUDA memory. Snapshots are written every log-interval steps by profile-ranks, and
    by any rank that runs out of memory."""
    memory_snapshot_path: str = "snapshot.pickle"
    """File of such a snapshot; the rank is added to its name."""
    profile_pipeline: PositiveInt | None = None
    """Step whose measured time line of all pipeline ranks is written to the run directory, as a picture and a trace."""
    trace_steps: tuple[PositiveInt, ...] = ()
    """Steps whose tensors are recorded, for megalite-verify. With save, a checkpoint is saved before each."""
    trace_dir: str | None = None
    """Folder of these records; unset: trace in the run directory."""
    trace_whole: bool = False
    """Record all elements of tensors, not sketches."""


@dataclass(frozen=True)
class WatchdogConfig:
    """Options of the watchdog, which detects a run that hangs, reports the missing rank, and ends the run."""

    watchdog: bool = True
    """End a run that hangs, and name a rank that dies. Turn off for a debugger: a breakpoint looks like a hang."""
    watchdog_min_seconds: PositiveFloat = 120.0
    """Least time after which a section (data, step, evaluation, ...) hangs; it is five times the longest so far."""
    timing_interval: NonNegativeInt = 100
    """Steps between lines about where ranks spend their time, and which is the slowest; 0: none."""


def logging_problems(logging: LoggingConfig) -> Iterator[str]:
    """Yield a line for each relation that does not hold."""
    if not logging.performance_monitor:
        yield from needs(logging, "performance_plan", "--performance-monitor")
    if logging.tensorboard_dir is not None and is_url(logging.tensorboard_dir):
        yield f"--tensorboard-dir {logging.tensorboard_dir}: TensorBoard appends to its files, which needs a folder"
    metrics = logging.metrics_path
    if metrics is not None and not is_url(metrics) and os.path.isdir(metrics):
        yield f"--metrics-path {metrics} is a folder: give a file, as {metrics.rstrip('/')}/metrics.jsonl"
    if logging.sample_interval is None:
        yield from needs(logging, "sample_prompts sample_tokens", "--sample-interval")


def sample_problems(
    logging: LoggingConfig, tokenizer_type: str | None, parallel: ParallelConfig, synchronization: SynchronizationConfig
) -> Iterator[str]:
    """Yield a line for each reason why the network cannot write texts while it is trained."""
    if logging.sample_interval is None:
        return
    if tokenizer_type in (None, "NullTokenizer"):
        yield "--sample-interval needs a tokenizer of text, and the NullTokenizer has none: give --tokenizer-type"
    if parallel.context_parallel_size > 1:
        yield (
            "--sample-interval: generation needs whole samples, so --context-parallel-size 1. Or generate from a "
            "checkpoint, by megalite-generate"
        )
    if synchronization.has_servers:
        yield (
            "--sample-interval: the workers of parameter servers take no steps together. Generate from a checkpoint, "
            "by megalite-generate"
        )


def profiling_problems(
    profiling: ProfilingConfig, save: str | None, tensorboard_dir: str | None, last: int | None, world_size: int
) -> Iterator[str]:
    """Yield a line for each relation that does not hold; `last` is the last step of the run, if it is known."""
    step = profiling.profile_pipeline
    if step is not None and save is None:
        yield f"--profile-pipeline {step} needs --save, the run directory"
    elif step is not None and save is not None and is_url(save):
        yield f"--profile-pipeline {step} writes files into --save, which must be a folder, not {save}"
    if step is not None and last is not None and step > last:
        yield f"--profile-pipeline {step} is beyond --train-iters {last}"
    if last is not None and (late := [each for each in profiling.trace_steps if each > last]):
        yield f"--trace-steps {late[0]} is beyond --train-iters {last}"
    if not profiling.trace_steps:
        yield from needs(profiling, "trace_dir trace_whole", "--trace-steps")
    if not profiling.profile_ranks:
        yield "--profile-ranks is empty: give at least one rank"
    for rank in profiling.profile_ranks:
        if not 0 <= rank < world_size:
            yield f"--profile-ranks {rank}: there are only ranks 0 to {world_size - 1}"
    start, end = profiling.profile_step_start, profiling.profile_step_end
    if not profiling.profile:
        yield from needs(profiling, "use_pytorch_profiler profile_step_start profile_step_end", "--profile")
    elif end <= start:
        yield f"--profile-step-end {end} is not after --profile-step-start {start}"
    elif last is not None and end > last:
        yield f"--profile-step-end {end} is beyond --train-iters {last}"
    by_torch = profiling.profile and profiling.use_pytorch_profiler
    if by_torch and save is None and tensorboard_dir is None:
        yield "--use-pytorch-profiler needs --save or --tensorboard-dir, where the traces go"
    # With --save, the file DIR/PROFILE can request a trace.
    if not by_torch and save is None:
        yield from needs(profiling, "pytorch_profiler_collect_*", "--profile --use-pytorch-profiler, or --save")
    if not profiling.profile or by_torch:
        yield from needs(profiling, "record_shapes", "--profile without --use-pytorch-profiler: it is for nsys")
    if not profiling.record_memory_history:
        yield from needs(profiling, "memory_snapshot_path", "--record-memory-history")
        if not profiling.profile and save is None:
            yield from needs(profiling, "profile_ranks", "--profile or --save")

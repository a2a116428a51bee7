"""Options that show where a run spends its time and its memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProfilingConfig:
    """Profiles of chosen steps. `touch DIR/PROFILE` asks a run for a trace of its next steps, without any flag."""

    profile: bool = False
    """Profile steps profile-step-start + 1 to profile-step-end: for nsys, or with use-pytorch-profiler by torch."""
    use_pytorch_profiler: bool = False
    """With profile: write traces by torch's profiler into the run directory, or else into tensorboard-dir."""
    profile_step_start: int = 10
    """Profile the steps after this one."""
    profile_step_end: int = 12
    """The last step that is profiled."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that are profiled."""
    pytorch_profiler_collect_shapes: bool = False
    """Traces have the shapes of what operations get."""
    pytorch_profiler_collect_callstack: bool = False
    """Traces have the lines of Python that operations come from."""
    record_shapes: bool = False
    """The same of the shapes for nsys."""
    record_memory_history: bool = False
    """Record what CUDA's allocator gives and takes, and write a snapshot of it every log-interval steps, of
    profile-ranks, and of any rank that runs out of memory."""
    memory_snapshot_path: str = "snapshot.pickle"
    """File of such a snapshot, which gets the rank into its name."""
    profile_pipeline: int | None = None
    """Step whose measured time line of all pipeline ranks is written to the run directory, as a picture and a trace."""

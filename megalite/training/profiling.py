"""Profiles of some steps: traces by torch's profiler, or ranges for nsys, which records from outside.

Requested by the flags of `ProfilingConfig`, or during the run by `touch DIR/PROFILE`. Also here: the history of CUDA's
allocator and the measured time line of one pipeline step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megalite.atomic_files import sync_directory, temporary_path
from megalite.config.monitoring import ProfilingConfig
from megalite.config.run import TaskConfig
from megalite.errors import CheckpointError, ConfigurationError, FileError
from megalite.parallel import collectives, device
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.device import profile_range
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage_module import StageModule
from megalite.pipeline.drawing import write_timeline
from megalite.pipeline.engine import Recording
from megalite.pipeline.schedules import Action
from megalite.pipeline.simulator import Span
from megalite.pipeline.stages import Stages
from megalite.pipeline.timeline import TimeLine
from megalite.storage import AnyPath, open_directory
from megalite.torch_internals import dump_memory, record_memory
from megalite.training.display import Display
from megalite.watchdog.sections import PROFILE, Sections

_MEMORY_EVENTS = 100_000  # number of latest allocations that are kept, in host memory
STEPS_OF_FILE = 3
"""Number of steps that a PROFILE file profiles, after one step to warm the profiler up."""


def require_device(config: ProfilingConfig, place: torch.device) -> None:
    """Raise ConfigurationError if a flag asks for something that only GPUs have."""
    if place.type == "cuda":
        return
    if config.profile and not config.use_pytorch_profiler:
        raise ConfigurationError(
            f"--profile marks steps for nsys, which profiles GPUs, but this run is on the {device.device_name(place)}: "
            "add --use-pytorch-profiler"
        )
    if config.record_memory_history:
        raise ConfigurationError(
            f"--record-memory-history records GPU memory, but this run is on the {device.device_name(place)}: "
            "leave it out"
        )


class Profiler:
    """Profiles of a run, one at a time. All ranks call it in the same way; only some of them record.

    Args:
        iteration: last step before the run starts or resumes.
    """

    def __init__(
        self, run: TaskConfig, mesh: ParallelMesh, display: Display, sections: Sections, iteration: int
    ) -> None:
        self._config = config = run.profiling
        self._mesh, self._display, self._sections = mesh, display, sections
        self._log_interval = run.logging.log_interval
        place = run.checkpoint.save or run.logging.tensorboard_dir
        self._directory = open_directory(place or ".") / "profile"  # nsys alone needs none
        self._steps, self._by_torch = range(0), True
        self._recorder: _Trace | _RangeForNsys | None = None
        if config.profile and config.profile_step_start >= iteration:
            self._plan(config.profile_step_start + 1, config.profile_step_end, by_torch=config.use_pytorch_profiler)
        elif config.profile:
            display.message(
                f"--profile-step-start {config.profile_step_start}: nothing is profiled, since the run continues after "
                f"step {iteration}"
            )

    def ask(self, iteration: int) -> None:
        """Request a trace of the next steps. `iteration` is the last completed step."""
        if self._steps:
            self._display.message(f"PROFILE: steps {self._between()} are about to be profiled: this request is ignored")
        else:
            self._plan(iteration + 2, iteration + 1 + STEPS_OF_FILE, by_torch=True)

    def finish(self) -> None:
        """End profiling, because the run ends."""
        if self._steps:
            self._display.message(f"the profile of steps {self._between()} is lost: the run ends before them")

    def _plan(self, first: int, last: int, *, by_torch: bool) -> None:
        self._steps, self._by_torch = range(first, last + 1), by_torch
        if self._mesh.rank in self._config.profile_ranks:
            self._recorder = _Trace(self._config) if by_torch else _RangeForNsys(self._config, self._mesh.device)

    def _between(self) -> str:
        return f"{self._steps[0]} to {self._steps[-1]}"

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Mark a step. `number` counts from 1."""
        if isinstance(self._recorder, _Trace) and number == self._steps[0] - 1:
            self._recorder.warm_up()
        if self._recorder is not None and number == self._steps[0]:
            self._recorder.begin()
        with profile_range(f"step {number}"):
            yield
        if self._steps and number == self._steps[-1]:
            with self._sections(PROFILE):
                self._write()
        if self._config.record_memory_history and number % self._log_interval == 0:
            problem = write_snapshot(self._config, self._mesh.rank)
            if problem is not None:
                self._display.message(problem)

    def _write(self) -> None:
        """Write the recorded steps, and tell where. A failed write is a warning, the same on every rank."""
        recorder, steps, by_torch = self._recorder, self._steps, self._by_torch
        self._recorder, self._steps = None, range(0)
        name = f"step_{steps[0]:07d}-{steps[-1]:07d}_rank_"
        if recorder is not None:
            recorder.end()
        try:
            with raise_on_all_ranks(self._mesh, f"writing the profile of steps {steps[0]} to {steps[-1]}"):
                if isinstance(recorder, _Trace):
                    recorder.write(self._directory / f"{name}{self._mesh.rank}.json.gz")
        except CheckpointError as error:  # training does not depend on it
            self._display.message(f"WARNING: {error}")
            return
        ranks = self._config.profile_ranks
        which = str(ranks[0]) if len(ranks) == 1 else "{" + ",".join(map(str, ranks)) + "}"
        place = f": {self._directory / name}{which}.json.gz, for ui.perfetto.dev" if by_torch else " for nsys"
        self._display.message(f"profiled steps {steps[0]} to {steps[-1]} on rank {which}{place}")


class _Trace:
    """Trace by torch's profiler, in Chrome's format."""

    def __init__(self, config: ProfilingConfig) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs every start and end of a profile
        # torch keeps pointers to the names in call stacks, but frees a module's code after its import: an import inside
        # the trace corrupts the file (pytorch issue 121219). So torch imports what `record_function` needs now.
        with torch.profiler.record_function("import"):
            pass
        self._profiler = torch.profiler.profile(
            record_shapes=config.pytorch_profiler_collect_shapes,
            with_stack=config.pytorch_profiler_collect_callstack,
        )
        self._prepared = False

    def warm_up(self) -> None:
        self._profiler.prepare_trace()
        self._prepared = True

    def begin(self) -> None:
        if not self._prepared:
            self._profiler.prepare_trace()
        self._profiler.start_trace()

    def end(self) -> None:
        self._profiler.stop_trace()

    def write(self, path: AnyPath) -> None:
        """Write the trace. Raises OSError."""
        if isinstance(path, Path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_path(path).with_suffix(".gz")  # because of this suffix torch compresses
            try:
                self._profiler.export_chrome_trace(str(temporary))
                temporary.rename(path)
            finally:
                temporary.unlink(missing_ok=True)
            sync_directory(path.parent)
            return
        with TemporaryDirectory(prefix="megalite-") as folder:
            self._profiler.export_chrome_trace(f"{folder}/{path.name}")
            path.put((Path(folder) / path.name).read_bytes())


class _RangeForNsys:
    """Range of steps for `nsys profile --capture-range=cudaProfilerApi`; operations and `profile_range`s become NVTX
    ranges."""

    def __init__(self, config: ProfilingConfig, place: torch.device) -> None:
        self._shapes, self._device, self._ranges = config.record_shapes, place, ExitStack()

    def begin(self) -> None:
        device.synchronize(self._device)
        torch.cuda.profiler.start()
        self._ranges.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=self._shapes))

    def end(self) -> None:
        self._ranges.close()
        device.synchronize(self._device)
        torch.cuda.profiler.stop()


# ---------------------------------------------------------------------------------------------------- memory history


def record_memory_history(config: ProfilingConfig, rank: int) -> None:
    """Start recording CUDA's allocations with their Python call stacks, for docs.pytorch.org/memory_viz.

    When memory runs out, a snapshot is written at once, before any of it is freed.
    """

    def out_of_memory(device: int, wanted: int, total: int, free: int) -> None:
        _dump_memory(config, f"out_of_memory_rank_{rank}")

    record_memory(_MEMORY_EVENTS, out_of_memory)


def write_snapshot(config: ProfilingConfig, rank: int) -> str | None:
    """Replace the snapshot of this rank if it is one of --profile-ranks. Returns a warning if that fails."""
    try:
        if rank in config.profile_ranks:
            _dump_memory(config, f"rank_{rank}")
    except OSError as error:
        return f"WARNING: --memory-snapshot-path {config.memory_snapshot_path} cannot be written: {error.strerror}"
    return None


def _dump_memory(config: ProfilingConfig, what: str) -> None:
    path = Path(config.memory_snapshot_path)
    path = path.with_stem(f"{path.stem}_{what}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    dump_memory(str(temporary))
    temporary.rename(path)


# ---------------------------------------------------------------------------------------------------- time line


def missed_step_note(step: int | None, iteration: int) -> tuple[str, ...]:
    """Return a note if a run resumes after the step whose time line is requested."""
    if step is None or step > iteration:
        return ()
    return (f"--profile-pipeline {step}: changes nothing, since the run continues after step {iteration}",)


def begin_recording(mesh: ParallelMesh) -> Recording:
    """Return a recording whose time starts on all ranks at the end of an all-reduce, that is, almost together."""
    collectives.all_reduce_(torch.zeros(1, device=mesh.device), mesh.world()).item()
    return Recording(mesh.device)


def write_recording(
    recording: Recording,
    stages: Stages,
    mesh: ParallelMesh,
    directory: Path,
    iteration: int,
    chunks: Sequence[StageModule],
) -> str | None:
    """Draw the step of rank 0's pipeline, of which this rank has `chunks`, into the run directory. Called by all ranks
    together.

    Returns a message on rank 0, a warning if writing fails; None on other ranks.
    """
    own = [
        [span.action.kind, span.action.micro_batch, span.action.chunk, span.action.peer, span.start, span.end]
        for span in recording.spans
    ]
    gathered = collectives.all_gather_json([own, [len(chunk.blocks()) for chunk in chunks]], mesh, "pp")
    if mesh.rank != 0:
        return None
    spans = [[Span(Action(*action), start, end) for *action, start, end in each] for each, _ in gathered]
    places = map(stages.place, range(stages.count))
    blocks = tuple(gathered[rank][1][chunk] for rank, chunk in places)
    time_line = TimeLine("", stages, spans, True, blocks).named(f"Step {iteration}, measured")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = write_timeline(directory, f"pipeline_step_{iteration:06d}", time_line)
    except (OSError, FileError) as error:
        return f"WARNING: the time line of step {iteration} is not in {directory}: {error}"
    return f"the time line of step {iteration} is in {' and '.join(map(str, paths))}"

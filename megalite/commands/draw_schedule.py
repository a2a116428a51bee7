"""Draw a pipeline schedule as a picture or a trace, from assumed or from measured times.

    python tools/draw_schedule.py --pipeline-schedule zb-v --pipeline-model-parallel-size 4 --num-micro-batches 8 \\
        --output zb-v.html zb-v.json
    python tools/draw_schedule.py --measured pipeline_step_000010.json --output measured.svg
    python tools/draw_schedule.py --measured pipeline_step_000010.json --pipeline-schedule zb-v --output zb-v.svg

The second command draws a step that a run with --profile-pipeline measured, the third the same step as it would be
under another schedule. An .svg and an .html are pictures; a .json is for ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from megalite.config.fields import NonNegativeFloat, PositiveFloat, PositiveInt, at_most, given
from megalite.config.parallel import SHAPES, ScheduleName
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.errors import ConfigurationError
from megalite.lifecycle.failure import run_tool
from megalite.process.output import say

if TYPE_CHECKING:
    from megalite.pipeline.stages import Stages
    from megalite.pipeline.timeline import TimeLine


LONGEST_TIME = at_most(1_000_000)
Time = Annotated[NonNegativeFloat, LONGEST_TIME]


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    output: tuple[str, ...]
    """Files to write, .svg, .html or .json."""
    pipeline_schedule: ScheduleName | None = None
    """The schedule; unset: the measured one."""
    pipeline_model_parallel_size: PositiveInt | None = None
    """Ranks; unset: as many as measured."""
    num_virtual_stages_per_pipeline_rank: PositiveInt | None = None
    """Chunks of the model on each rank: 2 or more for interleaved-1f1b, 2 for zb-v, 1 for the others."""
    num_micro_batches: PositiveInt | None = None
    """Micro-batches of a step; unset: as many as measured."""
    microbatch_group_size_per_virtual_pipeline_stage: PositiveInt | None = None
    """Micro-batches that go through a chunk before the next, for interleaved-1f1b; unset: as many as ranks."""
    measured: str | None = None
    """A .json that a run with --profile-pipeline, or this tool, wrote."""
    forward: Annotated[PositiveFloat, LONGEST_TIME] | None = None
    """Time of a stage's forward; unset: 1. The same holds for the next two flags."""
    backward_input: Time | None = None
    """Time of a stage's backward for its input."""
    backward_weight: Time | None = None
    """Time of a stage's backward for its weights."""
    transfer: Time | None = None
    """Time of a message; unset: 0."""


TIMES = "forward backward_input backward_weight"
SIZES = "pipeline_model_parallel_size num_* microbatch_group_size_per_virtual_pipeline_stage"


def main() -> None:
    """Parse the flags, write the drawings, and print a table."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")
    from megalite.pipeline.drawing import SUFFIXES, write

    for output in arguments.output:
        if Path(output).suffix not in SUFFIXES:
            raise ConfigurationError(f"--output {output}: the name must end in {', '.join(SUFFIXES)}")
    time_line = build_time_line(arguments)
    for output in arguments.output:
        write(time_line, Path(output))
    print_table(time_line)


def build_time_line(arguments: Arguments) -> TimeLine:
    """Return the time line that the flags describe: measured, or simulated from measured or assumed times."""
    from megalite.pipeline.schedules import SCHEDULES, orders_of
    from megalite.pipeline.simulator import durations, simulate
    from megalite.pipeline.timeline import TimeLine, measured_durations
    from megalite.pipeline.trace import read_trace

    measured = read_trace(Path(arguments.measured)) if arguments.measured is not None else None
    if measured is not None and (flags := given(arguments, TIMES)):
        raise ConfigurationError(f"{', '.join(flags)}: the times are those of --measured; drop one of the two")
    name = arguments.pipeline_schedule
    if name is None:
        if measured is None:
            raise ConfigurationError("give --pipeline-schedule, or --measured with a file to draw")
        if flags := given(arguments, f"{SIZES} transfer"):
            raise ConfigurationError(f"{', '.join(flags)}: without --pipeline-schedule the measured step is drawn")
        return measured
    stages = find_stages(arguments, name, measured)
    micro_batches = arguments.num_micro_batches or (None if measured is None else measured.micro_batches)
    if micro_batches is None:
        raise ConfigurationError("--num-micro-batches must be given, 1 or more")
    orders = orders_of(SCHEDULES[name], stages, micro_batches, find_group(arguments, name, stages))
    times = [1.0 if (time := getattr(arguments, flag)) is None else time for flag in TIMES.split()]
    duration = durations(*times) if measured is None else measured_durations(measured, stages)
    spans = simulate(stages, orders, duration, arguments.transfer or 0.0)
    return TimeLine("", stages, spans, in_seconds=measured is not None and measured.in_seconds).named(name)


def find_stages(arguments: Arguments, name: str, measured: TimeLine | None) -> Stages:
    """Return the pipeline that the flags describe, or the measured one."""
    from megalite.pipeline.stages import Stages

    ranks = arguments.pipeline_model_parallel_size or (None if measured is None else measured.stages.ranks)
    chunks = arguments.num_virtual_stages_per_pipeline_rank
    if ranks is None:
        raise ConfigurationError("--pipeline-model-parallel-size must be given, 1 or more")
    shape = SHAPES[name]
    if shape.chunks is None:
        chunks = chunks or (None if measured is None else measured.stages.chunks)
        if chunks is None or chunks < 2 or ranks < 2:
            problem = "2 or more --num-virtual-stages-per-pipeline-rank on 2 or more --pipeline-model-parallel-size"
            raise ConfigurationError(f"--pipeline-schedule {name} needs {problem}")
        return Stages(ranks, chunks)
    if chunks not in (None, shape.chunks):
        raise ConfigurationError(
            f"--pipeline-schedule {name} has {shape.chunks} chunks a rank: drop --num-virtual-stages-per-pipeline-rank "
            f"{chunks}"
        )
    return Stages(ranks, shape.chunks, shape.v_shaped)


def find_group(arguments: Arguments, name: str, stages: Stages) -> int | None:
    """Return the number of micro-batches that pass through a chunk before the next chunk; None for the default."""
    group = arguments.microbatch_group_size_per_virtual_pipeline_stage
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    if group is not None and name != "interleaved-1f1b":
        raise ConfigurationError(f"{flag} is for interleaved-1f1b: drop it, or choose that --pipeline-schedule")
    if group is not None and group < stages.ranks:
        raise ConfigurationError(f"{flag} {group} must be at least --pipeline-model-parallel-size {stages.ranks}")
    return group


def print_table(time_line: TimeLine) -> None:
    """Print the times of the step, and the computing time and peak activations per rank."""
    show, bubble, ideal = time_line.show, time_line.bubble, time_line.ideal
    say(time_line.title)
    say(f"time of a step  {show(bubble + ideal)}")
    say(f"ideal time      {show(ideal)}")
    say(f"bubble          {show(bubble)} ({100 * bubble / ideal:.1f} % of the ideal time)")
    say("rank  computes  peak activations" + (", of one chunk each" if time_line.stages.chunks > 1 else ""))
    for rank, (spans, peak) in enumerate(zip(time_line.computation, time_line.peaks, strict=True)):
        say(f"{rank:4}  {show(sum(span.end - span.start for span in spans)):>8}  {peak:16}")


command = partial(run_tool, main)

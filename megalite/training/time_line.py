"""The measured time line of one step of the pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megalite.errors import FileError
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite.pipeline.drawing import write_timeline
from megalite.pipeline.engine import Recording
from megalite.pipeline.schedules import Action
from megalite.pipeline.simulator import Span
from megalite.pipeline.stages import Stages
from megalite.pipeline.timeline import TimeLine


def gone_by(step: int | None, iteration: int) -> tuple[str, ...]:
    """Return a note if a run resumes after the step whose time line is asked for."""
    if step is None or step > iteration:
        return ()
    return (f"--profile-pipeline {step}: changes nothing, since the run goes on after step {iteration}",)


def begin_recording(mesh: ParallelMesh) -> Recording:
    """Return a recording whose time begins on all ranks together, as precisely as an all-reduce ends on all."""
    collectives.all_reduce_(torch.zeros(1, device=mesh.device), mesh.world()).item()
    return Recording(mesh.device)


def write_recording(
    recording: Recording, stages: Stages, mesh: ParallelMesh, directory: Path, iteration: int
) -> str | None:
    """Draw the step of the pipeline that rank 0 is in, into the run directory. All ranks call it together.

    Returns what to tell, on rank 0; training does not depend on it.
    """
    own = [
        [span.action.kind, span.action.micro_batch, span.action.chunk, span.action.peer, span.start, span.end]
        for span in recording.spans
    ]
    texts = collectives.all_gather_text(json.dumps(own), mesh.group("pp"), mesh.device)
    if mesh.rank != 0:
        return None
    spans = [[Span(Action(*action), start, end) for *action, start, end in json.loads(text)] for text in texts]
    time_line = TimeLine(f"Step {iteration}, measured", stages, spans, in_seconds=True)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = write_timeline(directory, f"pipeline_step_{iteration:06d}", time_line)
    except (OSError, FileError) as error:
        return f"WARNING: the time line of step {iteration} is not in {directory}: {error}"
    return f"the time line of step {iteration} is in {' and '.join(map(str, paths))}"

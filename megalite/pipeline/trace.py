"""Conversion of a time line to a trace for chrome://tracing and ui.perfetto.dev, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from megalite.errors import DataError
from megalite.pipeline.schedules import Action, Listed
from megalite.pipeline.simulator import Span
from megalite.pipeline.stages import Stages
from megalite.pipeline.timeline import COMPUTATIONS, TimeLine
from megalite.small_files import is_count, read_json, shown

MICROSECONDS = 1e6
MOST_MARKS = 6_000_000
"""Largest number of braces, brackets, commas and colons in a file: enough for 200,000 computations."""
LONGEST = 1e9
"""Largest time in a trace, in seconds."""
TRACKS = ("computation", "communication")

_STAGES = ("ranks", "chunks", "v_shaped")
"""Fields of `Stages` that a trace contains."""


def to_trace(time_line: TimeLine) -> str:
    """Return the time line in the Trace Event Format.

    Each rank is a process, with computation and communication as its threads. Assumed times count as seconds.
    """
    return json.dumps(
        {
            "traceEvents": list(_events(time_line)),
            "displayTimeUnit": "ms",
            "otherData": {
                "title": time_line.title,
                "stages": {name: getattr(time_line.stages, name) for name in _STAGES},
                "in_seconds": time_line.in_seconds,
                "blocks": time_line.blocks,
            },
        }
    )


def _events(time_line: TimeLine) -> Iterator[dict[str, object]]:
    """Yield the events of the trace format: names of ranks and tracks, and spans in microseconds."""
    for rank, spans in enumerate(time_line.spans):
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        for track, name in enumerate(TRACKS):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
        for span in spans:
            action = span.action
            yield {
                "ph": "X",
                "name": f"{action.kind} {action.micro_batch}",
                "cat": action.kind,
                "pid": rank,
                "tid": int(action.kind not in COMPUTATIONS),
                "ts": span.start * MICROSECONDS,
                "dur": (span.end - span.start) * MICROSECONDS,
                "args": {**action._asdict(), "stage": time_line.stages.stage(rank, action.chunk)},
            }


def read_trace(path: Path) -> TimeLine:
    """Return the time line of a file that was written by `to_trace`.

    Raises DataError if the file cannot be read or is not such a trace.
    """
    try:
        return parse_trace(path, read_json(path, most_marks=MOST_MARKS))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise _no_trace(path, error) from error


def parse_trace(path: Path, trace: Any) -> TimeLine:
    """Return the time line of a file's JSON, which `read_json` gave. Raises DataError if it is not such a trace."""
    try:
        return _time_line(trace)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_trace(path, error) from error


def _no_trace(path: Path, error: Exception) -> DataError:
    problem = f"{type(error).__name__}: {error}"
    return DataError(f"{path} is not a trace of --profile-pipeline or of draw_schedule.py ({problem})")


def _time_line(trace: Mapping[str, Any]) -> TimeLine:
    """Return the time line that a trace describes; a ValueError or KeyError says what it lacks."""
    header = trace["otherData"]
    stages = Stages(**{name: header["stages"][name] for name in _STAGES})
    if stages.ranks * stages.chunks > len(trace["traceEvents"]):  # each stage has at least one event
        raise ValueError("it has more stages than events")
    spans: list[list[Span]] = [[] for _ in range(stages.ranks)]
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rank, span = _span(event, stages)
            spans[rank].append(span)
    blocks = tuple(header.get("blocks", ()))
    if not all(map(is_count, blocks)) or len(blocks) not in (0, stages.count):
        raise ValueError(f"it has {shown(blocks)} as blocks of {stages.count} stages")
    time_line = TimeLine(str(header["title"]), stages, spans, bool(header["in_seconds"]), blocks)
    if not any(span.end > span.start for rank in time_line.computation for span in rank):
        raise ValueError("it has no computation")
    return time_line


def _span(event: Mapping[str, Any], stages: Stages) -> tuple[int, Span]:
    arguments = {name: value for name, value in event["args"].items() if name != "stage"}
    action, rank = Action(**arguments), event["pid"]
    start, end = event["ts"] / MICROSECONDS, (event["ts"] + event["dur"]) / MICROSECONDS
    known = action.kind in get_args(Listed) and rank in range(stages.ranks) and action.chunk in range(stages.chunks)
    if not (known and action.micro_batch >= 0 and 0 <= start <= end < LONGEST):
        raise ValueError(f"{event['name']} of rank {rank} is impossible")
    return rank, Span(action, start, end)

"""Presentation of the findings, for a person and for a program."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megalite.atomic_files import write_atomically
from megalite.doctor.alike import NOTHING
from megalite.doctor.figures import ACROSS, WITHIN, Figure, bus_factor, figures
from megalite.doctor.findings import Verdict
from megalite.doctor.judgement import Found
from megalite.process.place import ranks_text
from megalite.training import memory

Row = Sequence[str]


def show(found: Found, verdict: Verdict) -> None:
    """Print tables, and the verdict last."""
    blocks = [_head(found), _table(_nodes(found)), *map(_table, _bandwidths(found))]
    if found.timings and len(found.roll.nodes) == 1:
        blocks.append("there is one node: nothing goes across nodes")
    blocks.append("\n".join(verdict.lines()))
    print("\n\n".join(block for block in blocks if block), flush=True)


def write_json(path: str, found: Found, verdict: Verdict) -> None:
    """Write the findings and the verdict to a file. Raises FileError."""
    text = json.dumps(_as_json(found, verdict), indent=2)
    write_atomically(Path(path), f"{text}\n".encode())


def _head(found: Found) -> str:
    nodes = "1 node" if len(found.roll.nodes) == 1 else f"{len(found.roll.nodes)} nodes"
    ranks = "1 rank" if found.world_size == 1 else f"{found.world_size} ranks"
    traits = found.reports[0].traits
    software = ", ".join(f"{name} {value}" for name, value in traits["software"].items() if value != NOTHING)
    lines = [f"doctor: {ranks} on {nodes}, {found.backend}", f"  rank 0: {software}"]
    if found.config is not None and found.config.checkpoint.save is not None:
        size = "" if found.checkpoint_size is None else f", a checkpoint takes {memory.in_words(found.checkpoint_size)}"
        free = [
            each.directory.free for each in found.nodes.values() if each.directory and each.directory.free is not None
        ]
        room = f", {memory.in_words(min(free))} free" if free else ""
        lines.append(f"  run directory: {found.config.checkpoint.save}{room}{size}")
    files = {path for report in found.nodes.values() for path in report.files}
    if files:
        lines.append(f"  data: {len(files)} files")
    return "\n".join(lines)


def _nodes(found: Found) -> Iterator[Row]:
    yield "node", "ranks", "address", "GPUs", "driver", "open files", "/dev/shm", "clock"
    first = next(iter(found.roll.nodes))
    for node, report in found.nodes.items():
        state, clock = report.state, found.reached.get(node, {}).get(first)
        if state is None:
            continue
        names = sorted(set(state.gpus))
        gpus = f"{len(state.gpus)} x {', '.join(names)}" if names else "none"
        files = "any" if state.open_files == resource.RLIM_INFINITY else f"{state.open_files:,}"
        shared = "none" if state.shared_memory is None else memory.in_words(state.shared_memory)
        ahead = "" if clock is None or clock.problem else f"{round(-1e3 * clock.clock, 1) + 0.0:+} ms"
        address = "" if report.address is None else report.address[0]
        yield node, ranks_text(found.roll.nodes[node]), address, gpus, state.driver, files, shared, ahead


def _bandwidths(found: Found) -> Iterator[list[Row]]:
    every = list(figures(found.timings, found.roll.nodes))
    for scope in (WITHIN, ACROSS):
        timed = [figure for figure in every if figure.scope == scope]
        if not timed:
            continue
        yield [
            (f"{scope}, {timed[0].ranks} ranks", *(figure.operation for figure in timed)),
            *(
                (memory.in_words(size), *(_microseconds(figure.seconds.get(size)) for figure in timed))
                for size in sorted({size for figure in timed for size in figure.seconds})
            ),
            ("alpha", *(_microseconds(figure.line.alpha if figure.line else None) for figure in timed)),
            ("1 / beta", *(_bandwidth(figure, bus=False) for figure in timed)),
            ("bus bandwidth", *(_bandwidth(figure, bus=True) for figure in timed)),
        ]


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:,.0f} µs"


def _bandwidth(figure: Figure, *, bus: bool) -> str:
    # Where the largest message takes little more than an empty one, what is left for its bytes is noise.
    if figure.line is None or figure.line.beta * max(figure.seconds) < figure.line.alpha / 2:
        return ""
    factor = bus_factor(figure.operation, figure.ranks) if bus else 1
    return f"{figure.line.bandwidth() * factor / 1e9:.3g} GB/s"


def _table(rows: Iterator[Row] | Sequence[Row]) -> str:
    """Return a table as text; nothing if it has only a header."""
    rows = list(rows)
    if len(rows) < 2:
        return ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _as_json(found: Found, verdict: Verdict) -> dict[str, Any]:
    return {
        "exit_code": verdict.exit_code,
        "drop": verdict.drop,
        "findings": [asdict(finding) for finding in verdict.findings],
        "nodes": {
            node: {"ranks": found.roll.nodes[node]} | (asdict(report.state) if report.state else {})
            for node, report in found.nodes.items()
        },
        "checkpoint_bytes": found.checkpoint_size,
        "clock_ahead_seconds": {
            node: -others[first].clock
            for first in list(found.roll.nodes)[:1]
            for node, others in found.reached.items()
            if first in others and not others[first].problem
        },
        "timings": [asdict(figure) for figure in figures(found.timings, found.roll.nodes)],
    }

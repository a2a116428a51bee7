"""Verdict from all facts that rank 0 has collected, and its output as text and as JSON."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from megalite.atomic_files import write_atomically
from megalite.errors import EXIT_FINISHED
from megalite.extras.doctor.bandwidth import ACROSS, WITHIN, Figure, bus_factor, figures, slow_nodes
from megalite.extras.doctor.consistency import NOTHING, disagreements, examine_data
from megalite.extras.doctor.findings import Finding, Verdict
from megalite.extras.doctor.network import examine_network
from megalite.extras.doctor.reports import Found
from megalite.extras.doctor.run_directory import examine_run_directory
from megalite.process import output
from megalite.process.output import in_words, say
from megalite.process.place import ranks_by_value, ranks_text

Row = Sequence[str]


def judge(found: Found) -> Verdict:
    """Return the verdict with all findings."""
    verdict = Verdict(_findings(found))
    if found.stopped and verdict.exit_code == EXIT_FINISHED:
        text = "this was stopped before all checks were done: findings may be missing"
        verdict.findings.append(Finding("sick", text))
    return verdict


def _findings(found: Found) -> Iterator[Finding]:
    """Yield all findings: on absent and silent ranks, software, nodes, data, run directory, network and speed."""
    yield from found.findings
    yield from _absent(found)
    yield from _silent(found)
    problems = {rank: report.problem for rank, report in found.reports.items() if report.problem}
    for problem, ranks in ranks_by_value(problems).items():
        yield Finding("wrong", problem if len(ranks) == len(found.reports) else f"on {ranks_text(ranks)}: {problem}")
    yield from disagreements({rank: report.traits for rank, report in found.reports.items()}, found.roll.nodes)
    for node, report in found.nodes.items():
        yield from (Finding(each.severity, each.text, node) for each in report.findings)
    yield from examine_data({node: report.files for node, report in found.nodes.items()})
    seen = {node: report.directory for node, report in found.nodes.items() if report.directory is not None}
    if found.save is not None and seen:
        yield from examine_run_directory(found.save, seen, found.checkpoint_size, found.options.checkpoints)
    yield from examine_network(found.reached, found.addresses, next(iter(found.roll.nodes)))
    yield from _unmeasured(found)
    yield from slow_nodes(found.timings, found.roll.nodes)


def _absent(found: Found) -> Iterator[Finding]:
    """Yield ranks that never connected, by launcher; the node is known if another of its ranks has connected."""
    size = found.place.local_world_size or 1
    came = set(found.roll.ranks)
    launchers = {rank: rank // size for rank in range(found.world_size) if rank not in came}
    for launcher, ranks in ranks_by_value(launchers).items():
        siblings = {found.roll.node_of(rank) for rank in came if rank // size == launcher}
        node = siblings.pop() if len(siblings) == 1 else None
        where = "" if node is not None or size == 1 else f", of the launcher's node {launcher}"
        seconds = f"within {found.options.patience:g} seconds (--patience)"
        yield Finding("sick", f"{ranks_text(ranks)} of {found.world_size}{where} never connected {seconds}", node)


def _silent(found: Found) -> Iterator[Finding]:
    """Yield ranks that connected and then did not answer."""
    for node, ranks in found.roll.nodes.items():
        gone = [rank for rank in ranks if rank not in found.reports]
        if gone:
            yield Finding("sick", f"{ranks_text(gone)} connected, but then did not answer: ended, or suspended", node)
        first = found.reports.get(ranks[0])
        if first is not None and first.doing:
            yield Finding("sick", f"{first.doing} does not end: does a file system hang?", node)


def _unmeasured(found: Found) -> Iterator[Finding]:
    """Yield why there are no timings. If some ranks are silent, the others have only waited for them."""
    if found.measured is None:
        return
    for node, ranks in found.roll.nodes.items():
        gone = [rank for rank in ranks if rank not in found.measured]
        if gone:
            yield Finding("sick", f"{ranks_text(gone)} did not return from timing messages: ended, or suspended", node)
    if len(found.measured) == found.world_size:
        for failure, ranks in ranks_by_value(found.failures).items():
            yield Finding("sick", f"on {ranks_text(ranks)}: {failure}")


# ------------------------------------------------------------------------------------------------------- presentation


def show(found: Found, verdict: Verdict) -> None:
    """Print tables, and the verdict last."""
    blocks = [_head(found), _table(_nodes(found)), *map(_table, _bandwidths(found))]
    if found.timings and len(found.roll.nodes) == 1:
        blocks.append("there is one node: nothing goes across nodes")
    blocks.append("\n".join(verdict.lines()))
    say("\n\n".join(block for block in blocks if block))


def _head(found: Found) -> str:
    """Return the lines on who was examined: ranks, software, run directory and data."""
    nodes = "1 node" if len(found.roll.nodes) == 1 else f"{len(found.roll.nodes)} nodes"
    ranks = "1 rank" if found.world_size == 1 else f"{found.world_size} ranks"
    traits = found.reports[0].traits
    software = ", ".join(f"{name} {value}" for name, value in traits["software"].items() if value != NOTHING)
    lines = [f"doctor: {ranks} on {nodes}, {found.backend}", f"  rank 0: {software}"]
    if found.save is not None:
        size = "" if found.checkpoint_size is None else f", a checkpoint takes {in_words(found.checkpoint_size)}"
        directories = [report.directory for report in found.nodes.values() if report.directory is not None]
        free = [each.free for each in directories if each.free is not None]
        room = f", {in_words(min(free))} free" if free else ""
        lines.append(f"  run directory: {found.save}{room}{size}")
    files = {path for report in found.nodes.values() for path in report.files}
    if files:
        lines.append(f"  data: {len(files)} files")
    return "\n".join(lines)


def _nodes(found: Found) -> Iterator[Row]:
    """Yield the rows of the table of nodes, its head first."""
    yield "node", "ranks", "address", "GPUs", "driver", "open files", "/dev/shm", "clock"
    for node, report in found.nodes.items():
        state = report.state
        if state is None:
            continue
        names = sorted(set(state.gpus))
        gpus = f"{len(state.gpus)} x {', '.join(names)}" if names else "none"
        files = "any" if state.open_files == resource.RLIM_INFINITY else f"{state.open_files:,}"
        shared = "none" if state.shared_memory is None else in_words(state.shared_memory)
        ahead = f"{round(1e3 * found.clocks[node], 1) + 0.0:+} ms" if node in found.clocks else ""
        address = "" if report.address is None else report.address[0]
        yield node, ranks_text(found.roll.nodes[node]), address, gpus, state.driver, files, shared, ahead


def _bandwidths(found: Found) -> Iterator[list[Row]]:
    """Yield a table of times by message size for the ranks of a node, and one for those of all nodes."""
    every = list(figures(found.timings, found.roll.nodes))
    for scope in (WITHIN, ACROSS):
        timed = [figure for figure in every if figure.scope == scope]
        if not timed:
            continue
        yield [
            (f"{scope}, {timed[0].ranks} ranks", *(figure.operation for figure in timed)),
            *(
                (in_words(size), *(_microseconds(figure.seconds.get(size)) for figure in timed))
                for size in sorted({size for figure in timed for size in figure.seconds})
            ),
            ("alpha", *(_microseconds(figure.line.alpha if figure.line else None) for figure in timed)),
            ("1 / beta", *(_bandwidth(figure, bus=False) for figure in timed)),
            ("bus bandwidth", *(_bandwidth(figure, bus=True) for figure in timed)),
        ]


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:,.0f} µs"


def _bandwidth(figure: Figure, *, bus: bool) -> str:
    # If the largest message takes little longer than an empty one, the difference, the time for its bytes, is noise.
    if figure.line is None or figure.line.beta * max(figure.seconds) < figure.line.alpha / 2:
        return ""
    factor = bus_factor(figure.operation, figure.ranks) if bus else 1
    return f"{factor / figure.line.beta / 1e9:.3g} GB/s"


def _table(rows: Iterable[Row]) -> str:
    """Return a table as text; nothing if it has only a header."""
    header, *others = rows
    return "\n".join(output.table(header, others)) if others else ""


def write_json(path: str, found: Found, verdict: Verdict) -> None:
    """Write the findings and the verdict to a file. Raises FileError."""
    content = {
        "exit_code": verdict.exit_code,
        "drop": verdict.drop,
        "findings": [asdict(finding) for finding in verdict.findings],
        "nodes": {
            node: {"ranks": found.roll.nodes[node]} | asdict(report.state)
            for node, report in found.nodes.items()
            if report.state is not None
        },
        "checkpoint_bytes": found.checkpoint_size,
        "clock_ahead_seconds": found.clocks,
        "timings": [asdict(figure) for figure in figures(found.timings, found.roll.nodes)],
    }
    write_atomically(Path(path), f"{json.dumps(content, indent=2)}\n".encode())

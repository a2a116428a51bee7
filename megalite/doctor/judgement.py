"""Verdict from everything that rank 0 has learnt."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megalite.config import RunConfig
from megalite.doctor.alike import disagreements
from megalite.doctor.data_files import examine_data
from megalite.doctor.figures import Timing, slow_nodes
from megalite.doctor.findings import Finding, Verdict
from megalite.doctor.network import Reached, examine_network
from megalite.doctor.options import Options
from megalite.doctor.reports import Report, Roll
from megalite.doctor.run_directory import examine_run_directory
from megalite.errors import EXIT_FINISHED
from megalite.process.place import ranks_text


@dataclass
class Found:
    """Facts that rank 0 has learnt so far; on other ranks little of it is filled in."""

    world_size: int
    backend: str
    options: Options
    config: RunConfig | None
    roll: Roll
    findings: list[Finding]
    """Findings from before the ranks were asked."""
    reports: Mapping[int, Report] = field(default_factory=dict)
    checkpoint_size: int | None = None
    reached: Mapping[str, Mapping[str, Reached]] = field(default_factory=dict)
    """Results of connecting, by the node that tried, and the node that it tried to reach."""
    measured: Sequence[int] | None = None
    """Ranks that finished timing messages; None: no rank was asked to."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """Failures of timing, by rank."""
    timings: Sequence[Timing] = ()
    stopped: bool = False
    """True if rank 0 was asked to end meanwhile."""

    @property
    def firsts(self) -> dict[int, str]:
        """Return the first rank of each node, with the node."""
        return {ranks[0]: node for node, ranks in self.roll.nodes.items()}

    @property
    def nodes(self) -> dict[str, Report]:
        """Return the reports of the nodes' first ranks that have examined their nodes."""
        reports = {node: self.reports[rank] for rank, node in self.firsts.items() if rank in self.reports}
        return {node: report for node, report in reports.items() if report.state is not None}

    @property
    def heard(self) -> list[int]:
        """Return the ranks that answered last."""
        return list(self.reports if self.measured is None else self.measured)

    @property
    def addresses(self) -> dict[str, tuple[str, int]]:
        return {node: report.address for node, report in self.nodes.items() if report.address is not None}

    @property
    def can_measure(self) -> bool:
        """Tell whether all ranks are there, have valid flags of a run, and can reach one another."""
        complete = len(self.reports) == self.world_size and len(self.addresses) == len(self.roll.nodes)
        apart = any(each.problem for others in self.reached.values() for each in others.values())
        unready = any(report.doing or report.problem for report in self.reports.values())
        return self.options.max_bytes > 0 and self.world_size > 1 and complete and not apart and not unready


def judge(found: Found) -> Verdict:
    """Return the verdict with all findings."""
    verdict = Verdict.of(_findings(found))
    if found.stopped and verdict.exit_code == EXIT_FINISHED:
        broken_off = Finding("sick", "this was to end before everything was looked at: what is told is not all")
        return Verdict.of([*verdict.findings, broken_off])
    return verdict


def _findings(found: Found) -> list[Finding]:
    first = next(iter(found.roll.nodes))
    return [
        *found.findings,
        *_absent(found),
        *_silent(found),
        *_flags(found),
        *disagreements({rank: report.traits for rank, report in found.reports.items()}, found.roll.nodes),
        *(Finding(each.severity, each.text, node) for node, report in found.nodes.items() for each in report.findings),
        *examine_data({node: report.files for node, report in found.nodes.items()}),
        *_run_directory(found),
        *examine_network(found.reached, found.addresses, first),
        *_unmeasured(found),
        *slow_nodes(found.timings, found.roll.nodes),
    ]


def _absent(found: Found) -> Iterator[Finding]:
    """Yield ranks that never came, by launcher; its node is known if another of its ranks has come."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    came = set(found.roll.ranks)
    by_launcher: dict[int, list[int]] = {}
    for rank in range(found.world_size):
        if rank not in came:
            by_launcher.setdefault(rank // size, []).append(rank)
    for launcher, ranks in by_launcher.items():
        siblings = {found.roll.node_of(rank) for rank in came if rank // size == launcher}
        node = siblings.pop() if len(siblings) == 1 else None
        where = "" if node is not None or size == 1 else f", of the launcher's node {launcher}"
        seconds = f"within {found.options.patience:g} seconds (--patience)"
        yield Finding("sick", f"{ranks_text(ranks)} of {found.world_size}{where} never came {seconds}", node)


def _silent(found: Found) -> Iterator[Finding]:
    """Yield ranks that came and then did not answer."""
    for node, ranks in found.roll.nodes.items():
        gone = [rank for rank in ranks if rank not in found.reports]
        if gone:
            yield Finding("sick", f"{ranks_text(gone)} came and then did not answer: ended, or stopped", node)
        first = found.reports.get(ranks[0])
        if first is not None and first.doing:
            yield Finding("sick", f"{first.doing} does not come to an end: does a file system hang?", node)


def _flags(found: Found) -> Iterator[Finding]:
    """Yield what is wrong with the flags of all ranks, or of some."""
    problems = {rank: report.problem for rank, report in found.reports.items() if report.problem}
    for problem in dict.fromkeys(problems.values()):
        ranks = [rank for rank, each in problems.items() if each == problem]
        yield Finding("wrong", problem if len(ranks) == len(found.reports) else f"on {ranks_text(ranks)}: {problem}")


def _run_directory(found: Found) -> Iterator[Finding]:
    seen = {node: report.directory for node, report in found.nodes.items() if report.directory is not None}
    if found.config is not None and found.config.checkpoint.save is not None and seen:
        save, count = found.config.checkpoint.save, found.options.checkpoints
        yield from examine_run_directory(save, seen, found.checkpoint_size, count)


def _unmeasured(found: Found) -> Iterator[Finding]:
    """Yield why there are no timings. If some ranks are silent, the others have only waited for them."""
    if found.measured is None:
        return
    for node, ranks in found.roll.nodes.items():
        gone = [rank for rank in ranks if rank not in found.measured]
        if gone:
            yield Finding("sick", f"{ranks_text(gone)} did not come back from timing messages: ended, or stopped", node)
    if len(found.measured) == found.world_size:
        for failure in dict.fromkeys(found.failures.values()):
            ranks = [rank for rank, each in found.failures.items() if each == failure]
            yield Finding("sick", f"on {ranks_text(ranks)}: {failure}")

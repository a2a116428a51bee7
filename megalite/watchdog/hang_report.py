"""What the dumps of a hang say, put together for a person or for a machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megalite.watchdog.hang_analysis import Finding, missing, ranks_text
from megalite.watchdog.hang_dump import Dumps, RankDump

SHOWN = 20  # findings of each kind in the text
_ADDRESS = re.compile(r"0x[0-9a-f]+")  # of a thread, by which stacks that are alike differ


@dataclass(frozen=True)
class HangReport:
    """A hang: the ranks to blame, why, and where each rank stood."""

    culprits: tuple[int, ...]
    findings: tuple[Finding, ...]
    places: tuple[tuple[RankDump, ...], ...]
    """The ranks with a file, in sets that were in the same section with the same stacks; the smallest set first."""
    without_file: tuple[int, ...]
    problems: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The same as plain values, with the stacks of each set once."""
        return {
            "culprits": self.culprits,
            "findings": [asdict(finding) for finding in self.findings],
            "places": [
                {"ranks": [dump.rank for dump in place], "section": place[0].section, "stacks": place[0].stacks}
                for place in self.places
            ],
            "without_file": self.without_file,
            "problems": self.problems,
        }

    def as_text(self) -> str:
        """Several lines, the most telling first."""
        count = sum(map(len, self.places))
        lines = [f"{count} of {count + len(self.without_file)} ranks have left a file"]
        if self.without_file:
            lines.append(f"without one: {ranks_text(self.without_file)}")
        lines += [f"note: {problem}" for problem in self.problems]
        lines += ["", f"HELD UP BY {ranks_text(self.culprits)}" if self.culprits else "No rank is known to hold it up."]
        for title, cause in (("because:", True), ("and so:", False)):
            texts = [finding.text for finding in self.findings if finding.cause is cause]
            lines += [title, *(f"  - {text}" for text in texts[:SHOWN])] if texts else []
            lines += [f"  ... and {len(texts) - SHOWN} more, which --json tells"] if len(texts) > SHOWN else []
        for place in self.places:
            stacks = place[0].stacks.strip() or "(no stacks)"
            lines += ["", f"{_where(place)}:", *(f"    {line}" for line in stacks.splitlines())]
        return "\n".join(lines)


def hang_report(dumps: Dumps) -> HangReport:
    """The report of what `read_dumps` has found."""
    findings = missing(dumps.snapshots, dumps.silent)
    culprits = {rank for finding in findings if finding.cause for rank in finding.culprits}
    places: dict[tuple[str, str], list[RankDump]] = {}
    for dump in dumps.ranks.values():
        places.setdefault((dump.section, _ADDRESS.sub("0x", dump.stacks)), []).append(dump)
    return HangReport(
        culprits=tuple(sorted(culprits)),
        findings=tuple(findings),
        places=tuple(map(tuple, sorted(places.values(), key=len))),
        without_file=tuple(rank for rank in dumps.silent if rank not in dumps.ranks),
        problems=dumps.problems,
    )


def _where(place: Sequence[RankDump]) -> str:
    first = place[0]
    parts = [ranks_text(dump.rank for dump in place)]
    hosts = sorted({dump.host for dump in place} - {""})
    if hosts:
        parts.append(f"on {', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''}")
    if len(place) == 1 and first.pid:
        parts.append(f"(process {first.pid})")
    if first.section:
        parts.append(f"in {first.section} for {min(dump.seconds for dump in place):.0f} s")
    return " ".join(parts)

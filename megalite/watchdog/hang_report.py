"""Report on the dumps of a hang, for a person or for a machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megalite.process.place import ranks_text
from megalite.watchdog.hang_analysis import Diagnosis, missing
from megalite.watchdog.hang_dump import Dumps, RankDump

SHOWN = 20  # findings of each kind in the text
# Each begins at but one place of a line or of several empty ones: else a text of a megabyte is looked at for hours.
_NEXT_THREAD = re.compile(r"(?<!\n)\n+(?=thread )")
_FILE = re.compile(r'^  File "(.*)", line', re.MULTILINE)
_OWN_THREADS = ("thread monitor:", "thread watchdog:", "thread signals:")
_WAITING = ("threading.py", "queue.py", "selectors.py", "thread.py")  # of the standard library, in which threads idle


@dataclass(frozen=True)
class HangReport:
    """Report on a hang: the ranks to blame, the reason, and where each rank was."""

    culprits: tuple[int, ...]
    findings: tuple[Diagnosis, ...]
    places: tuple[tuple[RankDump, ...], ...]
    """Ranks with a file, in sets that were in the same section at the same lines; the ranks to blame come first."""
    without_file: tuple[int, ...]
    problems: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the same as plain values, with the stacks of each set once."""
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
        """Return several lines, the most important first."""
        count = sum(map(len, self.places))
        lines = [f"{count} of {count + len(self.without_file)} ranks have left a file"]
        if self.without_file:
            lines.append(f"without one: {ranks_text(self.without_file)}")
        lines += [f"note: {problem}; the rest is used" for problem in self.problems]
        lines += ["", f"HELD UP BY {ranks_text(self.culprits)}" if self.culprits else "No rank is known to hold it up."]
        for title, cause in (("because:", True), ("and so:", False)):
            texts = [finding.text for finding in self.findings if finding.cause is cause]
            lines += [title, *(f"  - {text}" for text in texts[:SHOWN])] if texts else []
            lines += [f"  ... and {len(texts) - SHOWN} more, which --json tells"] if len(texts) > SHOWN else []
        for place in self.places:
            stacks = _telling(place[0].stacks) or "(no stacks)"
            lines += ["", f"{_where(place)}:", *(f"    {line}" for line in stacks.splitlines())]
        return "\n".join(lines)


def hang_report(dumps: Dumps) -> HangReport:
    """Return the report on the result of `read_dumps`."""
    findings = missing(dumps.snapshots, dumps.silent)
    culprits = {rank for finding in findings if finding.cause for rank in finding.culprits}
    places: dict[tuple[str, str], list[RankDump]] = {}
    for dump in dumps.ranks.values():
        places.setdefault((dump.section, _telling(dump.stacks)), []).append(dump)

    def order(place: list[RankDump]) -> tuple[bool, int]:
        return culprits.isdisjoint(dump.rank for dump in place), len(place)

    return HangReport(
        culprits=tuple(sorted(culprits)),
        findings=tuple(findings),
        places=tuple(map(tuple, sorted(places.values(), key=order))),
        without_file=tuple(rank for rank in dumps.silent if rank not in dumps.ranks),
        problems=dumps.problems,
    )


def _telling(stacks: str) -> str:
    """Return the main thread's stack, and those of other threads that are doing something."""
    main, *others = _NEXT_THREAD.split(stacks.strip())
    busy = [other for other in others if not other.startswith(_OWN_THREADS) and not _idles(other)]
    return "\n\n".join([main, *busy])


def _idles(stack: str) -> bool:
    files = _FILE.findall(stack)
    return not files or files[-1].rpartition("/")[2] in _WAITING


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

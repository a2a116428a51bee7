"""Reports on ranks that died, and on hangs: a short text, or all details of the dumps as text or JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite.process.launchers import GENERATION
from megalite.process.place import ranks_text
from megalite.watchdog.hang_analysis import Diagnosis, missing
from megalite.watchdog.hang_dump import Dumps, RankDump
from megalite.watchdog.link import Message, Peer, place_text, printable_line

SHOWN = 20  # findings of each kind in the text
_CONSEQUENCES = 5  # shown of a hang, in its message
_MOST = 6  # lines of each other kind in it
_NAMED = 16  # ranks that died, with process and machine
_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)', re.MULTILINE)
# A match can begin at only one place of a line, or of several empty lines. Otherwise a text of 1 MB takes hours.
_NEXT_THREAD = re.compile(r"(?<!\n)\n+(?=thread )")
_FILE = re.compile(r'^  File "(.*)", line', re.MULTILINE)
_OWN_THREADS = ("thread monitor:", "thread watchdog:", "thread signals:")
_WAITING = ("threading.py", "queue.py", "selectors.py", "thread.py")  # of the standard library, where idle threads wait


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
        places = [
            {"ranks": [dump.rank for dump in place], "section": place[0].section, "stacks": place[0].stacks}
            for place in self.places
        ]
        return vars(self) | {"findings": [asdict(finding) for finding in self.findings], "places": places}

    def as_text(self) -> str:
        """Return several lines, the most important first."""
        count = sum(map(len, self.places))
        lines = [f"{count} of {count + len(self.without_file)} ranks have left a file"]
        if self.without_file:
            lines.append(f"without one: {ranks_text(self.without_file)}")
        lines += [f"note: {problem}; the rest is used" for problem in self.problems]
        lines += [
            "",
            f"BLOCKED BY {ranks_text(self.culprits)}" if self.culprits else "No rank is known to block the run.",
        ]
        for title, cause in (("because:", True), ("as a result:", False)):
            texts = [finding.text for finding in self.findings if finding.cause is cause]
            lines += [title, *(f"  - {text}" for text in texts[:SHOWN])] if texts else []
            lines += [f"  ... and {len(texts) - SHOWN} more, which --json shows"] if len(texts) > SHOWN else []
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

    in_order = tuple(map(tuple, sorted(places.values(), key=order)))
    without_file = tuple(rank for rank in dumps.silent if rank not in dumps.ranks)
    return HangReport(tuple(sorted(culprits)), tuple(findings), in_order, without_file, dumps.problems)


def _telling(stacks: str) -> str:
    """Return the stack of the main thread, and the stacks of other threads that are not idle."""
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


# ------------------------------------------------------------------------------------------------------- messages


def silence_text(peer: Peer, seconds: float) -> str:
    """Return the warning that a rank has given no sign of life."""
    return (
        f"warning: {peer} has given no sign of life for {seconds:.0f} s, last seen in {peer.place}: it is suspended, "
        "or in a call that lets no other thread run"
    )


def death(lost: Sequence[tuple[Peer, float]]) -> str:
    """Describe ranks whose processes have ended without a message.

    Each comes with the age, in seconds, of its last known section when it ended: it may have got further since.
    """
    who = ", ".join(str(peer) for peer, _ in lost[:_NAMED])
    if len(lost) > _NAMED:
        who += f" and {ranks_text(peer.rank for peer, _ in lost[_NAMED:])}"
    have = "have" if len(lost) > 1 else "has"
    places: dict[str, list[tuple[int, float]]] = {}
    for peer, seconds in lost:
        places.setdefault(peer.place, []).append((peer.rank, seconds))
    last = []
    for where, there in places.items():
        ranks = f" ({ranks_text(rank for rank, _ in there)})" if len(places) > 1 else ""
        last.append(f"in {where}{ranks}, {max(seconds for _, seconds in there):.1f} s before")
    return (
        f"{who} {have} ended without a message, last seen {', '.join(_few(last))}: killed, by a person or for lack "
        f"of memory (see the system's log: dmesg), crashed, or without power or network. {_what_follows()}"
    )


def hang(
    rank: int,
    why: Message,
    peers: Mapping[int, Peer],
    dumps: Mapping[int, RankDump],
    silence: Mapping[int, float],
    folder: Path | None,
    never_came: Sequence[int] = (),
    unread: int = 0,
) -> str:
    """Describe a run in which `rank` waits too long or has lost the connection to another rank.

    `silence` has the ranks that do not answer, with the seconds since they last did; `folder` has the dumps as files;
    `never_came` are the ranks that have never connected to the monitor; `unread` have answered, too many to be read in
    time. What blocks the run may be among them, so that the dumps of the others tell nothing.
    """
    report = hang_report(Dumps({} if unread else dumps, tuple(sorted(silence)), ()))
    lines = [_alarm(peers[rank], why)]
    lines += _few(
        f"{peers[other]} has not answered for {seconds:.0f} s: it is suspended or cannot be reached, last seen in "
        f"{peers[other].place}"
        for other, seconds in sorted(silence.items())
    )
    lines += _few(
        f"rank {other} never connected to rank 0's watchdog: it ended or hangs before that, or cannot reach it"
        for other in never_came
    )
    if unread:
        lines.append(
            f"the answers of {unread:,} of {len(peers):,} ranks could not be read in time: what blocks the run may be "
            f"{'in their files' if folder else 'known with --save, which leaves a file of each'}"
        )
    busy = [dumps[culprit] for culprit in report.culprits if culprit in dumps]
    lines += _few(
        f"{peers[dump.rank]} blocks it, in {place_text(dump.step, dump.section)}: {_innermost(dump)}" for dump in busy
    )
    if not report.culprits and report.places:  # no rank waits for another: name the one in a different place
        first = report.places[0][0]
        lines.append(f"{peers[first.rank]} is in {_innermost(first)}")
    lines += _few(finding.text for finding in report.findings if finding.cause and set(finding.culprits) - set(silence))
    lines += [finding.text for finding in report.findings if not finding.cause][:_CONSEQUENCES]
    lines = list(map(printable_line, lines))
    if folder is not None:
        lines.append(f"more about each rank: megalite-hang-report {folder}")
    return "\n  ".join([*lines, _what_follows()])


def _few(lines: Iterable[str]) -> list[str]:
    """Return the first lines, and the number of further ones."""
    found = list(lines)
    return [*found[:_MOST], *([f"... and {len(found) - _MOST} more like that"] if len(found) > _MOST else [])]


def _alarm(peer: Peer, why: Message) -> str:
    if "lost" in why:
        return f"{peer}, in {peer.place}: {why['lost']}"
    if "silent" in why:
        return f"the run hangs: at least one rank has given no sign of life for {why['silent']:.0f} s"
    section, seconds, limit = why["overdue"]
    return f'step {peer.step} hangs: {peer} has been in "{section}" for {seconds:.0f} s, the limit is {limit:.0f}'


def _innermost(dump: RankDump) -> str:
    """Return the innermost Python frame of a rank's main thread."""
    frames = _FRAME.findall(dump.stacks.partition("\nthread ")[0])
    return "{} line {}, in {}".format(*frames[-1]) if frames else "no Python code"


def _what_follows() -> str:
    if GENERATION in os.environ:
        return "The ranks end, and start again (docs/recovery.md)"
    return "The run ends; --resume auto continues from its last checkpoint"

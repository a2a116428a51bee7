"""Messages on ranks that have gone, or that the others wait for in vain."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.process.place import ranks_text
from megalite.watchdog.hang_dump import Dumps, RankDump
from megalite.watchdog.hang_report import hang_report
from megalite.watchdog.link import Message
from megalite.watchdog.sections import OpenSection

_CONSEQUENCES = 5  # of a hang, in its message
_MOST = 6  # lines of each other sort in it
_LINE = 500  # characters of each line
_NAMED = 16  # ranks that have died, with process and machine
_LARGEST = 2**53  # a number of a message
_LONGEST = 2**8  # characters of a text of a message
_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)', re.MULTILINE)
_FOLDER = re.compile(r"[0-9]{8}T[0-9]{6}")
_GO_ON = "The run ends; --resume auto continues from its last checkpoint"


@dataclass
class Peer:
    """Rank as the monitor knows it, from the rank's own message."""

    rank: int
    host: str
    process: int
    start: int
    """Time when its process began (process/host.py)."""
    space: str
    """Namespace in which its process number is valid."""
    section: str = ""
    """Innermost section that it was last in."""
    step: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Peer:
        """Restore from `dataclasses.asdict` and JSON. Raises ValueError or KeyError if the values do not fit."""
        return cls(
            rank=whole(values["rank"]),
            host=words(values["host"]),
            process=whole(values["process"], 2**31 - 1),
            start=whole(values["start"]),
            space=words(values["space"]),
            section=words(values["section"]),
            step=whole(values["step"]),
        )

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"

    @property
    def place(self) -> str:
        return place(self.step, self.section)


def whole(value: Any, largest: int = _LARGEST) -> int:
    """Return a whole number of a message. Raises ValueError if it is not from 0 to the largest."""
    if type(value) is not int or not 0 <= value <= largest:
        raise ValueError("no whole number, or too large a one")
    return value


def words(value: Any) -> str:
    """Return a short, printable text of a message. Raises ValueError if it is not one."""
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        raise ValueError("no text, too long a one, or one that is not for people")
    return value


def exit_code(value: Any) -> int:
    """Return an exit code of a message. Raises ValueError if it is not one: the system would take 256 for 0, a good
    end."""
    return whole(value, 255)


def place(step: int, section: str) -> str:
    """Return the place of a rank in the run."""
    return f'step {step}, "{section}"' if section else f"step {step}"


def overdue(section: OpenSection, limit: float) -> Message:
    """Return the message on a section that takes longer than its limit, in seconds."""
    return {"overdue": [section.name, section.seconds, limit]}


def alarm_of(message: Message) -> Message:
    """Return the part of a message on an overdue section or a failed communication; empty for any other message.

    Raises ValueError, TypeError or OverflowError if it makes no sense.
    """
    if "lost" in message:
        return {"lost": _line(str(message["lost"]))}
    if "overdue" in message:
        section, seconds, limit = message["overdue"]
        return {"overdue": [words(section), float(seconds), float(limit)]}
    return {}


def death(lost: Sequence[tuple[Peer, float]]) -> str:
    """Describe ranks whose processes have ended without a message.

    Each comes with the seconds before its end in which its place was not known: it may have got further.
    """
    who = ", ".join(str(peer) for peer, _ in lost[:_NAMED])
    if len(lost) > _NAMED:
        who += f" and {ranks_text(peer.rank for peer, _ in lost[_NAMED:])}"
    have = "have" if len(lost) > 1 else "has"
    places: dict[str, list[tuple[int, float]]] = {}
    for peer, seconds in lost:
        places.setdefault(peer.place, []).append((peer.rank, seconds))
    last = ", ".join(
        _few(
            f"in {where}{f' ({ranks_text(rank for rank, _ in there)})' if len(places) > 1 else ''}, "
            f"{max(seconds for _, seconds in there):.1f} s before"
            for where, there in places.items()
        )
    )
    return (
        f"{who} {have} ended without a word, last heard of {last}: killed, as by a person or for want of memory (the "
        f"system's log has that: dmesg), crashed, or without power or network. {_GO_ON}"
    )


def folder_name() -> str:
    """Return the name, by the time, of the folder that ranks write their dumps to."""
    return time.strftime("%Y%m%dT%H%M%S")


def folder_named(value: Any) -> str:
    """Return a `folder_name` of a message. Raises ValueError if it is not valid: it could lead anywhere."""
    if not isinstance(value, str) or not _FOLDER.fullmatch(value):
        raise ValueError("no name of a folder")
    return value


def hang(
    rank: int,
    why: Message,
    peers: Mapping[int, Peer],
    dumps: Mapping[int, RankDump],
    silence: Mapping[int, float],
    folder: Path | None,
    missing: Sequence[int] = (),
) -> str:
    """Describe a run in which `rank` waits too long, or has lost another rank.

    `silence` has the ranks that do not answer, with the seconds since they last did; `folder` has the dumps as files;
    `missing` are the ranks that have never connected to the monitor.
    """
    report = hang_report(Dumps(dumps, tuple(sorted(silence)), ()))
    lines = [_alarm(peers[rank], why)]
    lines += _few(
        f"{peers[other]} does not answer, for {seconds:.0f} s: it is stopped or cannot be reached, last heard of in "
        f"{peers[other].place}"
        for other, seconds in sorted(silence.items())
    )
    lines += _few(
        f"rank {other} has never come to rank 0's watchdog: it ended or stands still before that, or cannot reach it"
        for other in missing
    )
    busy = [dumps[culprit] for culprit in report.culprits if culprit in dumps]
    lines += _few(
        f"{peers[dump.rank]} holds it up, in {place(dump.step, dump.section)}: {_innermost(dump)}" for dump in busy
    )
    if not report.culprits and report.places:  # nobody waits for another: who is elsewhere than the others is told
        first = report.places[0][0]
        lines.append(f"{peers[first.rank]} is in {_innermost(first)}")
    lines += _few(finding.text for finding in report.findings if finding.cause and set(finding.culprits) - set(silence))
    lines += [finding.text for finding in report.findings if not finding.cause][:_CONSEQUENCES]
    lines = list(map(_line, lines))
    if folder is not None:
        lines.append(f"more of each rank: python tools/hang_report.py {folder}")
    return "\n  ".join([*lines, _GO_ON])


def _few(lines: Iterable[str]) -> list[str]:
    """Return the first lines, and the number of further ones."""
    found = list(lines)
    return [*found[:_MOST], *([f"... and {len(found) - _MOST} more like that"] if len(found) > _MOST else [])]


def _line(text: str) -> str:
    """Return a printable line of a text from ranks, which may have any length and contents."""
    cut = text if len(text) <= _LINE else f"{text[: _LINE - 3]}..."
    return "".join(one if one.isprintable() else "?" for one in " ".join(cut.split()))


def _alarm(peer: Peer, why: Message) -> str:
    if "lost" in why:
        return f"{peer}, in {peer.place}: {why['lost']}"
    section, seconds, limit = why["overdue"]
    return f'step {peer.step} hangs: {peer} has been in "{section}" for {seconds:.0f} s, and may be for {limit:.0f}'


def _innermost(dump: RankDump) -> str:
    """Return the innermost Python frame of a rank's main thread."""
    frames = _FRAME.findall(dump.stacks.partition("\nthread ")[0])
    return "{} line {}, in {}".format(*frames[-1]) if frames else "no code in Python"

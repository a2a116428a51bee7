"""What is said of ranks that are gone, or that the others wait for in vain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megalite.watchdog.link import Message
from megalite.watchdog.sections import OpenSection

_GO_ON = "The run ends; --resume auto continues from its last checkpoint"


@dataclass
class Peer:
    """A rank as the monitor knows it: by its own word."""

    rank: int
    host: str
    process: int
    space: str
    """Where its process number holds."""
    at: list[str] = field(default_factory=list)
    """The sections that it was last in."""
    step: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"

    @property
    def place(self) -> str:
        return f'step {self.step}, "{self.at[-1]}"' if self.at else f"step {self.step}"


def overdue(section: OpenSection, limit: float) -> Message:
    """What a rank tells of a section that takes longer than its limit, in seconds."""
    return {"overdue": [section.name, section.seconds, limit]}


def loss(lost: Sequence[Peer]) -> str:
    """Of ranks whose processes have ended without a word."""
    who = ", ".join(map(str, lost))
    have = "have" if len(lost) > 1 else "has"
    return (
        f"{who} {have} ended without a word, in {lost[0].place}: killed, as by a person or for want of memory (the "
        f"system's log has that: dmesg), or crashed. {_GO_ON}"
    )


def hang(
    rank: int,
    why: Message,
    peers: Mapping[int, Peer],
    dumps: Mapping[int, Message],
    silence: Mapping[int, float],
    folder: Path | None,
    missing: Sequence[int] = (),
) -> str:
    """Of a run in which `rank` waits too long, or has lost another one: `silence` has the ranks that do not answer, and
    for how long they have not; `missing` are those that have never come to the monitor."""
    lines = [_alarm(peers[rank], why)]
    lines += [
        f"{peers[other]} does not answer, for {seconds:.0f} s: it is stopped or cannot be reached, and was last in "
        f"{peers[other].place}"
        for other, seconds in sorted(silence.items())
    ]
    lines += [
        f"rank {other} has never come to rank 0's watchdog: it ended or stands still before that, or cannot reach it"
        for other in missing
    ]
    if folder is not None:
        lines.append(f"what each rank was in: python tools/hang_report.py {folder}")
    return "\n  ".join([*lines, _GO_ON])


def _alarm(peer: Peer, why: Message) -> str:
    if "lost" in why:
        return f"{peer}, in {peer.place}: {why['lost']}"
    section, seconds, limit = why["overdue"]
    return f'step {peer.step} hangs: {peer} has been in "{section}" for {seconds:.0f} s, and may be for {limit:.0f}'

"""Fate of each flag of another program: accepted, changed, without effect here, or refused with the reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from megalite.config.command_line import flag_groups
from megalite.config.fields import flag_of
from megalite.config.megatron_flags import tables
from megalite.config.parse import settle
from megalite.config.run import fields_by_name
from megalite.errors import ConfigurationError

_QUOTED = re.compile(r"(['\"])(.*)\1", re.DOTALL)
_MOST_LINES = 4
"""Largest number of flags without effect that have a line each."""


def _as_flag(name: str, value: object) -> list[str]:
    """Return the flag that sets a field, with its values."""
    if isinstance(value, bool):
        return [flag_of(name if value else f"no_{name}")]
    return [flag_of(name), *map(str, value if isinstance(value, tuple) else (value,))]


@dataclass
class Report:
    """Result of a translation.

    Attributes:
        flags: the flags for megalite, which keep Megatron-LM's as they are: some act on each other.
        accepted: number of flags that are kept as they are.
        changed: lines about what has another name or value here.
        idle: lines about what changes nothing here.
        refused: lines about what megalite does not have, with what to do instead.
        missing: lines about values that the file does not have.
        notes: lines about what was assumed.
        nodes: number of nodes, if the file says it.
        per_node: number of ranks on a node, if the file says it.
        whole: whether the file has all flags of a run.
        launcher: words of the command before the program. What a shell is to expand is between two marks.
        shell: number of these words that start the shell which expands the others.
        environment: variables to set.
        program: the program of a launch script, as it is written there.
    """

    flags: list[str] = field(default_factory=list)
    accepted: int = 0
    changed: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    nodes: int | None = None
    per_node: int | None = None
    whole: bool = False
    launcher: tuple[str, ...] = ()
    shell: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    program: str = ""

    @property
    def world_size(self) -> int | None:
        """Number of ranks; None if the file does not say it."""
        return None if self.per_node is None else (self.nodes or 1) * self.per_node

    def last_of_each(self, argv: Sequence[str]) -> dict[str, list[str]]:
        """Return the values of each flag, and note those that are given again: argparse takes the last ones."""
        last: dict[str, list[str]] = {}
        for flag, values in flag_groups(argv):
            if flag in last and last.pop(flag) != values:
                self.notes.append(f"--{flag} is given more than once: the last, {' '.join(values) or 'on'}, is taken")
            last[flag] = values
        return last

    def add_megatron(self, argv: Sequence[str]) -> None:
        """Sort the flags of a command for Megatron-LM."""
        for flag, values in self.last_of_each(argv).items():
            plain = [_QUOTED.sub(r"\2", value) if _QUOTED.fullmatch(value) else value for value in values]
            given = " ".join([f"--{flag}", *values] if flag else values)
            needs = re.compile(f"--{'[-_]'.join(map(re.escape, flag.split('-')))} needs ")
            needed = [line for line in self.missing if needs.search(line)]
            try:
                fields, note = settle(flag, plain)
            except ConfigurationError as error:
                name = tables()["aliases"].get(flag, flag).replace("-", "_")
                if needed and (name in fields_by_name() or name.removeprefix("no_") in fields_by_name()):
                    continue  # the value is not known yet
                self.refused += str(error).splitlines()
                fields, note = {}, "refused"
            else:
                self.idle += [note] if note and not fields else []
            if note and not fields and needed:  # without it nobody needs to know the value
                self.missing = [line for line in self.missing if line not in needed]
            elif note != "refused":
                self.flags += [f"--{flag}", *plain]
            if note and not fields:
                continue
            meant = [word for name, value in fields.items() for word in _as_flag(name, value)]
            if meant[:1] in ([], [f"--{flag}"]) and plain == values:
                self.accepted += 1
            else:
                self.changed.append(f"{given} -> {' '.join(meant)}")

    def add(self, source: str, *flags: str) -> None:
        """Add flags of megalite, and a line on what they stand for."""
        self.flags += flags
        self.changed.append(f"{source} -> {' '.join(flags)}")

    def note_decay(self, program: str) -> None:
        """Add a note on the parameters whose weights decay, if any do."""
        decays = [value for flag, value in pairwise(self.flags) if flag == "--weight-decay"]
        if decays and float(decays[-1]):
            self.notes.append(f"{program} decays norms and biases, too, which are not decayed here")

    def lines(self) -> Iterable[str]:
        """Yield the report, line by line."""
        if self.accepted:
            yield f"accepted: {self.accepted} flag{'s' * (self.accepted > 1)} as given"
        yield from (f"changed: {line}" for line in self.changed)
        if len(self.idle) > _MOST_LINES:
            names = " ".join(line.partition(":")[0] for line in self.idle)
            yield f"no effect: {len(self.idle)} that change nothing here: {names}"
        else:
            yield from (f"no effect: {line}" for line in self.idle)
        yield from (f"note: {line}" for line in self.notes)
        yield from (f"needed: {line}" for line in self.missing)
        yield from (f"refused: {line}" for line in self.refused)

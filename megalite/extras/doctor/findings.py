"""Flags of megalite-doctor itself, and findings: what is wrong, on which node, and whether the run can start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from megalite.config.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat
from megalite.errors import EXIT_CONFIGURATION, EXIT_FATAL, EXIT_FINISHED

Severity = Literal["sick", "wrong", "warning"]
"""Kind of a fault. sick: in nodes or the network; wrong: in the run's flags or files; warning: a run may start."""

SMALLEST = 1024
"""Smallest message that is timed, in bytes; each size is four times the one before."""


@dataclass(frozen=True)
class Options:
    """Checks to do, and time limits; all other flags are those of the run."""

    node: bool = False
    """Check this node alone, within a second or two: for a prolog or a health check."""
    gpus: NonNegativeInt | None = None
    """GPUs that each node must have; unset, with --node: the value of SLURM_GPUS_ON_NODE."""
    checkpoints: NonNegativeInt = 3
    """Checkpoints that the run directory must have room for."""
    max_bytes: NonNegativeInt = 2**26
    """Largest message that is timed, in bytes; 0: time none."""
    seconds: NonNegativeFloat = 30.0
    """Time in seconds for timing messages; if it is too short, the largest sizes are left out."""
    patience: PositiveFloat = 60.0
    """Seconds after which a rank that has not answered is given up."""
    json: str | None = None
    """File to write all findings to."""


@dataclass(frozen=True)
class Finding:
    """Fault that a person should know of."""

    severity: Severity
    text: str
    node: str | None = None
    """Node with the fault; None: no single node."""


class Verdict:
    """Conclusion from all findings together: each is kept once, in the order they came."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = list(dict.fromkeys(findings))

    @property
    def drop(self) -> list[str]:
        """Nodes to leave out."""
        return list(dict.fromkeys(finding.node for finding in self._of("sick") if finding.node is not None))

    @property
    def exit_code(self) -> int:
        """Exit code: 0 if a run may begin, with warnings too; 93 if anything is sick; 64 if things are only wrong."""
        if self._of("sick"):
            return EXIT_FATAL
        return EXIT_CONFIGURATION if self._of("wrong") else EXIT_FINISHED

    def lines(self) -> list[str]:
        """Return the reasons, the worst last, and then the verdict, which says what to do."""
        ordered = (finding for kind in ("warning", "wrong", "sick") for finding in self._of(kind))
        reasons = (f"{each.severity}: {f'node {each.node}: ' if each.node else ''}{each.text}" for each in ordered)
        return [*reasons, f"verdict: {self._summary()}"]

    def _summary(self) -> str:
        if self.drop:
            more = any(finding.node is None for finding in self._of("sick")) or self._of("wrong")
            return f"drop node {', '.join(self.drop)}" + (", and repair the rest" if more else "")
        if self.exit_code != EXIT_FINISHED:
            return "a run would fail, and not because of one node"
        warnings = len(self._of("warning"))
        return "well" + (f", with {warnings} warning{'s' if warnings > 1 else ''}" if warnings else "")

    def _of(self, kind: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == kind]

"""Results of a verification: one line for people, and everything as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megalite.extras.verify.judgement import LIMIT, Judgement
from megalite.extras.verify.suspect import Hypothesis

RIGHT, WRONG, UNKNOWN = 0, 1, 2
"""Exit codes: nothing differs by more than rounding explains; something does; nothing could be compared."""


@dataclass(frozen=True)
class Figure:
    """Number of the step beside the one that should have come out.

    Attributes:
        tolerance: how far rounding takes it at most, with half a unit in the last digit of what was logged.
    """

    name: str
    recorded: float
    expected: float
    tolerance: float

    @property
    def ratio(self) -> float:
        """Distance as a multiple of the tolerance."""
        distance = abs(self.recorded - self.expected)
        if distance == 0.0:
            return 0.0
        return distance / self.tolerance if self.tolerance and math.isfinite(distance) else math.inf

    @property
    def differs(self) -> bool:
        """True if the tolerance does not explain the distance."""
        return not self.ratio <= 1.0


@dataclass(frozen=True)
class Verdict:
    """Result of a verification.

    Attributes:
        judgements: all comparisons of tensors, in the order of execution.
        first: the first tensor that differs; None if none does.
        ranks: the ranks on which it differs.
        hypotheses: explanations of it, the best first.
        figures: numbers of the step: loss, norm of the gradient.
        further: lines on what else differs: the update, the samples.
        skipped: why tensors were not compared, with their number.
        notes: what was assumed.
        next_flags: flags to turn off next, to narrow the cause (`--bisect`).
    """

    judgements: Sequence[Judgement]
    first: Judgement | None
    ranks: Sequence[int] = ()
    hypotheses: Sequence[Hypothesis] = ()
    figures: Sequence[Figure] = ()
    further: Sequence[str] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    next_flags: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        if self.first is not None or self.further or any(figure.differs for figure in self.figures):
            return WRONG
        return RIGHT if self.judgements or self.figures else UNKNOWN

    @property
    def line(self) -> str:
        """The verdict in one line."""
        if (first := self.first) is not None:
            where = "" if first.layer is None else f" (layer {first.layer})"
            ranks = f"rank{'s' * (len(self.ranks) > 1)} {shown_ranks(self.ranks)}"
            best = next((each.text for each in self.hypotheses if each.explains), "no hypothesis explains it")
            return (
                f"{shown_name(first)}{where} on {ranks} is the first tensor that differs, by "
                f"{shown_ratio(first.ratio)} times what rounding explains: {best}"
            )
        if wrong := next((figure for figure in self.figures if figure.differs), None):
            best = next((f": {each.text}" for each in self.hypotheses if each.explains), "")
            return (
                f"{wrong.name} is {wrong.recorded:.8g} and should be {wrong.expected:.8g}, give or take "
                f"{wrong.tolerance:.1g}{best}"
            )
        if self.further:
            return self.further[0]
        if not self.judgements and not self.figures:
            return "nothing could be compared: see what was left out, and why"
        most = max([0.0, *(each.ratio for each in self.judgements), *(LIMIT * each.ratio for each in self.figures)])
        count = len(self.judgements) + len(self.figures)
        return f"no bug: all {count:,} values are within {most:.2g} times what rounding explains (limit: {LIMIT:g})"

    def as_json(self) -> dict[str, Any]:
        """Return everything for programs. Infinities are null."""
        first = self.first
        return {
            "verdict": {RIGHT: "right", WRONG: "wrong", UNKNOWN: "unknown"}[self.exit_code],
            "line": self.line,
            "limit": LIMIT,
            "first": None if first is None else _judgement(first) | {"ranks": list(self.ranks)},
            "hypotheses": [
                {"kind": each.kind, "text": each.text, "left": _number(each.ratio), "explains": each.explains}
                | ({} if each.factor is None else {"factor": each.factor})
                for each in self.hypotheses
            ],
            "figures": [
                {
                    "name": each.name,
                    "recorded": _number(each.recorded),
                    "expected": _number(each.expected),
                    "tolerance": _number(each.tolerance),
                    "ratio": _number(each.ratio),
                    "differs": each.differs,
                }
                for each in self.figures
            ],
            "further": list(self.further),
            "tensors": [_judgement(each) for each in self.judgements],
            "skipped": dict(self.skipped),
            "notes": list(self.notes),
            "next_flags": list(self.next_flags),
        }


def shown_name(judgement: Judgement) -> str:
    """Return the name of a recorded tensor for people, in the words of its program."""
    entry = judgement.entry
    words = {"parameter": "parameter", "gradient": "gradient of", "main_gradient": "gradient of"}
    role = words.get(entry.role, f"{entry.role.replace('_', ' ')} of")
    at = f", micro-batch {entry.micro_batch}" if judgement.point is not None and entry.micro_batch > 0 else ""
    return f"{role} {entry.name}{at}"


def shown_ratio(ratio: float) -> str:
    """Return a ratio for people."""
    return f"{ratio:.3g}" if ratio < 1000 else f"{ratio:,.0f}" if ratio < 1e9 else f"{ratio:.0e}"


def _judgement(judgement: Judgement) -> dict[str, Any]:
    """Return a judgement for programs."""
    entry = judgement.entry
    return {
        "name": entry.name,
        "role": entry.role,
        "rank": entry.rank,
        "micro_batch": entry.micro_batch,
        "layer": judgement.layer,
        "point": None if judgement.point is None else judgement.point.module,
        "ratio": _number(judgement.ratio),
        "relative": _number(judgement.relative),
        "relative_rounding": _number(judgement.rounding / judgement.norm) if judgement.norm else None,
        "spread": _number(judgement.spread),
        "differs": judgement.differs,
        "source": entry.source,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def shown_ranks(ranks: Sequence[int]) -> str:
    """Return ranks for people, with runs of them as first-last."""
    ordered, runs = sorted(set(ranks)), list[list[int]]()
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")

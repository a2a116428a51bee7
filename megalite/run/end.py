"""Summary of a run when it ends, from its records."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from megalite.process.output import in_words
from megalite.storage import AnyPath
from megalite.training.facts import Facts

SHORT = 2**24
"""Bytes of a file of records, some 20,000 steps."""


def end_summary(facts: Facts) -> dict[str, str]:
    """Return names and values for the display; nothing without the record of a step."""
    last, skipped, restarts = facts.last, facts.skipped, len(facts.restarts)
    if not last:
        return {}
    lines = {
        "steps": f"{last['iteration']:,.0f}" + (f", {skipped} skipped" if skipped else ""),
        "consumed": f"{last['consumed_samples']:,.0f} samples"
        + (f", {last['consumed_tokens']:,.0f} tokens" if "consumed_tokens" in last else ""),
    }
    if total := sum(facts.spent.values()):
        again = f", with {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
        lines |= {"time": f"{_duration(total)}{again}", "of the time": _shares(facts.spent)}
    lines |= {"speed": _speed(facts), "loss": _loss(facts)}
    if facts.efficiency is not None:
        working, waiting = facts.efficiency
        lines["ranks"] = f"work {working:.1%} of a step; all wait {waiting:.1%} of it"
    if facts.peak is not None:
        counted = "" if facts.predicted is None else f"; counted at the start: {in_words(facts.predicted)} on rank 0"
        lines["memory"] = f"at most {in_words(facts.peak[0])} on rank {facts.peak[1]}{counted}"
    return lines


def is_short(path: AnyPath) -> bool:
    """Tell whether a file of records is read in a second or so."""
    return path.stat().st_size < SHORT


def what_next(directory: AnyPath | None, *, finished: bool, generates: bool) -> dict[str, str]:
    """Return the commands that go on from a run. `generates`: it has trained a language model."""
    if directory is None:
        return {"saved": "nothing, without --save"}
    lines = {"report": f"megalite-report {directory}"}
    if generates:
        lines["generate"] = f"megalite-generate --load {directory}"
    return lines if finished else {"continue": "the same command, with --resume auto", **lines}


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def _shares(spent: Mapping[str, float]) -> str:
    """Return the share of each cause that has a part of the time that shows, the largest first."""
    total = sum(spent.values()) or 1.0
    shown = sorted(((seconds / total, cause) for cause, seconds in spent.items()), reverse=True)
    return ", ".join(f"{cause} {share:.1%}" for share, cause in shown if share >= 0.0005)


def _speed(facts: Facts) -> str:
    items, mfu = ("tokens", facts.mean("tokens_per_second")), facts.mean("mfu")
    if items[1] is None:
        items = "samples", facts.mean("samples_per_second")
    return f"{items[1] or 0.0:,.0f} {items[0]}/s in steps" + ("" if mfu is None else f", MFU {mfu:.1%}")


def _loss(facts: Facts) -> str:
    parts = [f"{facts.last['loss']:.4f} in the last step"] if "loss" in facts.last else []
    if facts.best is not None:
        parts.append(f"best validation {facts.best[0]:.4f} at step {facts.best[1]:,}")
    if facts.test_loss is not None:
        parts.append(f"test {facts.test_loss:.4f}")
    return ", ".join(parts)

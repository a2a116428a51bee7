"""`megalite-verify`, with all that the run leaves. The reference run is not looked at."""

from __future__ import annotations

from pathlib import Path

from megalite.extras.verify.commands.verify import Arguments, verdicts
from megalite.extras.verify.verdict import RIGHT, WRONG, Verdict, shown_name
from museum.detectors.finding import Finding


def detect(case: Path) -> Finding:
    """Return the first verdict that accuses the run."""
    run = case / "run"
    names = ("checkpoint", "checkpoint_next", "metrics.jsonl")
    here = {name: str(run / name) for name in names if (run / name).exists()}
    command = (run / "command.txt").read_text()
    arguments = Arguments(
        command=command,
        checkpoint=here.get("checkpoint"),
        trace=str(run / "trace"),
        metrics=here.get("metrics.jsonl"),
        next=here.get("checkpoint_next"),
        samples="--data-path" in command,
    )
    codes = []
    for _, verdict in verdicts(arguments):
        codes.append(verdict.exit_code)
        if verdict.exit_code == WRONG:
            return _finding(verdict)
    return Finding("right" if RIGHT in codes else "unknown")


def _finding(verdict: Verdict) -> Finding:
    """Return what the verdict's line says first, with a hypothesis if it explains the difference."""
    best = next((each.text for each in verdict.hypotheses[:1] if each.explains), None)
    if verdict.first is not None:
        return Finding("wrong", shown_name(verdict.first).partition(", micro-batch")[0], best)
    figure = next((each for each in verdict.figures if each.differs), None)
    if figure is not None:
        return Finding("wrong", figure.name, best)
    return Finding("wrong", "sample", verdict.line)

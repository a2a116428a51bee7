"""Summary of a run when it ends, from its records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from megalite.storage import AnyPath
from megalite.training.goodput import seconds_by_cause

Record = Mapping[str, Any]
_KEYS = (
    *("iteration", "consumed_samples", "consumed_tokens", "grad_norm", "skipped", "lm_loss", "loss", "valid_loss"),
    *("test_loss", "tokens_per_second", "samples_per_second", "mfu", "scaling_efficiency", "communication_share"),
    *("peak_memory_bytes", "peak_memory_bytes/max", "peak_memory_bytes/max_rank"),
    *("wall_time", "iteration_time_s", "data_time_s", "evaluation_time_s", "save_time_s", "start_time_s"),
)
"""Figures that the summary takes: a long run has millions of others."""
SHORT = 2**24
"""Bytes of a file of records, some 20,000 steps."""


def end_summary(records: Iterable[Record], predicted: str = "") -> dict[str, str]:
    """Return names and values for the display; nothing without the record of a step.

    `predicted`: the memory that the start of the run has shown, in words.
    """
    every = [{key: record[key] for key in _KEYS if key in record} for record in records]
    steps = [record for record in every if "grad_norm" in record]
    if not steps:
        return {}
    last, skipped = steps[-1], sum(bool(step["skipped"]) for step in steps)
    spent = seconds_by_cause(every)
    restarts = sum("start_time_s" in record for record in every[1:])
    lines = {
        "steps": f"{last['iteration']:,}" + (f", {skipped} skipped" if skipped else ""),
        "consumed": f"{last['consumed_samples']:,} samples"
        + (f", {last['consumed_tokens']:,} tokens" if "consumed_tokens" in last else ""),
    }
    if total := sum(spent.values()):
        again = f", with {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
        lines |= {"time": f"{_duration(total)}{again}", "of the time": _shares(spent)}
    lines |= {"speed": _speed(steps), "loss": _loss(every, last)}
    if efficiency := [record for record in steps if "scaling_efficiency" in record]:
        found = efficiency[-1]
        lines["ranks"] = (
            f"work {found['scaling_efficiency']:.1%} of a step; all wait {found['communication_share']:.1%} of it"
        )
    return lines | {"memory": _memory(steps, predicted)}


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


def _speed(steps: Sequence[Record]) -> str:
    """Return the items per second over the time of all steps, and the mean utilization over the same time."""
    name = "tokens_per_second" if "tokens_per_second" in steps[0] else "samples_per_second"
    seconds = sum(step["iteration_time_s"] for step in steps)
    items = sum(step[name] * step["iteration_time_s"] for step in steps if step.get(name) is not None)
    used = [(step["mfu"], step["iteration_time_s"]) for step in steps if step.get("mfu") is not None]
    text = f"{items / seconds if seconds else 0.0:,.0f} {name.removesuffix('_per_second')}/s in steps"
    if not used:
        return text
    return f"{text}, MFU {sum(mfu * time for mfu, time in used) / (sum(time for _, time in used) or 1.0):.1%}"


def _loss(records: Sequence[Record], last: Record) -> str:
    name = "lm_loss" if "lm_loss" in last else "loss"
    parts = [f"{float(last[name]):.4f} in the last step"] if name in last else []
    evaluated = [(float(record["valid_loss"]), record["iteration"]) for record in records if "valid_loss" in record]
    finite = [each for each in evaluated if each[0] == each[0]]
    if finite:
        loss, iteration = min(finite)
        parts.append(f"best validation {loss:.4f} at step {iteration:,}")
    parts += [f"test {float(record['test_loss']):.4f}" for record in records[-1:] if "test_loss" in record]
    return ", ".join(parts) or "has another name"


def _memory(steps: Sequence[Record], predicted: str) -> str:
    """Return the peak over ranks of the last record that has it, or that of rank 0 if that is more or alone."""
    peak, rank = max(step["peak_memory_bytes"] for step in steps), 0
    gathered = [step for step in steps if "peak_memory_bytes/max" in step]
    if gathered and gathered[-1]["peak_memory_bytes/max"] >= peak:
        peak, rank = gathered[-1]["peak_memory_bytes/max"], int(gathered[-1]["peak_memory_bytes/max_rank"])
    return f"at most {peak / 2**30:,.2f} GiB on rank {rank}" + (
        f"; counted at the start: {predicted}" if predicted else ""
    )

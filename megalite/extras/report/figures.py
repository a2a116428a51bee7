"""Figures of a report, each a function of the records of a run."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from megalite.extras.report.recorded import Recorded
from megalite.process.output import printable
from megalite.process.place import consecutive

RECENT = 0.02
"""Share of the steps, the last ones, over which the loss now is a mean."""
SKIPPED, NOT_FINITE, SAVED, RESTARTED, DECIDED = "skipped", "not finite", "saved", "restarted", "decided"
LEFT_OUT = "left out"
MARKS = {
    RESTARTED: "the run started again",
    SKIPPED: "a step was skipped",
    NOT_FINITE: "the loss was not finite",
    LEFT_OUT: "the update was left out",
    DECIDED: "a decision of the ledger",
    SAVED: "time went into a save, or a copy in memory",
}
"""Kinds of marks on the curves, and what they say."""


@dataclass(frozen=True)
class Mark:
    """Event of a run after a step, of a kind in `MARKS`."""

    step: int
    kind: str
    words: str


def figures(run: Recorded) -> dict[str, float | int | str | None]:
    """Return the figures at the head of a report by name; None where the records do not have them."""
    steps, found = run.steps, run.facts
    loss = steps.values(found.loss)
    return {
        "first_step": steps.steps[0] if len(steps) else None,
        "last_step": steps.steps[-1] if len(steps) else None,
        "planned_steps": planned_steps(run),
        "state": state(run),
        "loss": recent_mean(loss),
        "last_loss": loss[-1] if loss else None,
        "best_valid_loss": None if found.best is None else found.best[0],
        "best_valid_step": None if found.best is None else found.best[1],
        "last_valid_loss": run.validation.last("valid_loss"),
        "test_loss": found.test_loss,
        "consumed_samples": found.last.get("consumed_samples"),
        "consumed_tokens": found.last.get("consumed_tokens"),
        "seconds": sum(found.spent.values()) or None,
        "tokens_per_second": found.mean("tokens_per_second"),
        "samples_per_second": found.mean("samples_per_second"),
        "mfu": found.mean("mfu"),
        "peak_memory_bytes": None if found.peak is None else found.peak[0],
        "peak_memory_rank": None if found.peak is None else found.peak[1],
        "predicted_memory_bytes": found.predicted,
        "skipped_steps": found.skipped,
        "steps_without_finite_loss": sum(not math.isfinite(value) for value in loss),
        "goodput": found.share("steps"),
        "restarts": len(found.restarts),
        "decisions": len(run.decisions),
        "last_written": found.written,
    }


def state(run: Recorded) -> str:
    """Return in a word how far the run is: empty, finished, diverged or unfinished."""
    if not len(run.steps):
        return "empty"
    losses = run.steps.values(run.facts.loss)
    if run.finished:
        return "finished"
    return "diverged" if losses and not math.isfinite(losses[-1]) else "unfinished"


def planned_steps(run: Recorded) -> int | None:
    """Return the number of steps that the configuration asks for, if it counts steps."""
    training = run.config.get("training")
    wanted = training.get("train_iters") if isinstance(training, Mapping) else None
    return wanted if isinstance(wanted, int) else None


def recent_mean(values: Sequence[float]) -> float | None:
    """Return the mean of the last `RECENT` of the values, at least of one; None if there are none."""
    if not values:
        return None
    recent = values[-max(1, round(RECENT * len(values))) :]
    return sum(recent) / len(recent) if all(map(math.isfinite, recent)) else math.nan


def median(values: Sequence[float]) -> float | None:
    """Return the median of the finite values; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else None


def marks(run: Recorded) -> list[Mark]:
    """Return what happened in a run, by step."""
    norms = dict(run.steps.pairs("grad_norm"))
    skipped = [step for step, on in run.steps.pairs("skipped") if on]
    found = [
        Mark(step, LEFT_OUT, "the update was left out")
        if math.isfinite(norms.get(step, math.nan))
        else Mark(step, SKIPPED, "skipped: gradients not finite")
        for step in skipped
    ]
    found += [
        Mark(step, NOT_FINITE, "loss not finite")
        for step, loss in run.steps.pairs(run.facts.loss)
        if not math.isfinite(loss)
    ]
    found += [
        Mark(step - 1, SAVED, f"{value:.3g} s of a save, or of a copy in memory")
        for step, value in run.steps.pairs("save_time_s")
    ]
    found += [Mark(step, RESTARTED, "started again") for step in run.facts.restarts]
    found += [Mark(each["step"], DECIDED, _decision(each)) for each in run.decisions]
    return sorted(found, key=lambda mark: mark.step)


def _decision(line: Mapping[str, object]) -> str:
    return printable(": ".join(str(line[key])[:300] for key in ("kind", "why") if line.get(key)))


def ranges(steps: Sequence[int]) -> str:
    """Return steps as text, ranges in short: "3, 7 to 9"."""
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in consecutive(steps)]
    shown = parts[:8]
    return ", ".join(shown) + (f" and {len(parts) - 8} more" if len(parts) > 8 else "")


def findings(run: Recorded) -> list[str]:
    """Return in plain words what somebody should know first, the worst first."""
    found = list(run.problems)
    branches = (each for each in run.decisions if each.get("kind") == "branch")
    found += [printable(f"This run is {each.get('why')}"[:1000]) + "." for each in branches]
    steps = run.steps
    if not len(steps):
        return found
    events = marks(run)
    not_finite = [mark.step for mark in events if mark.kind == NOT_FINITE]
    if not_finite:
        found.append(f"The loss was not finite in {counted(len(not_finite), 'step')}: {ranges(not_finite)}.")
    skipped = [mark.step for mark in events if mark.kind == SKIPPED]
    if skipped:
        found.append(f"{counted(len(skipped), 'step')} skipped, as gradients were not finite: {ranges(skipped)}.")
    left_out = [mark.step for mark in events if mark.kind == LEFT_OUT]
    if left_out:
        found.append(f"The update of {counted(len(left_out), 'step')} was left out, as told: {ranges(left_out)}.")
    found += _rising(run)
    found += _slowest(run)
    found += _waiting(run)
    found += _pauses(run)
    if run.decisions:
        kinds = sorted({str(each.get("kind", "?"))[:60] for each in run.decisions})
        found.append(f"{counted(len(run.decisions), 'decision')} in ledger.jsonl ({', '.join(kinds[:8])}).")
    return found


def _rising(run: Recorded) -> Iterator[str]:
    """Say whether the validation loss rises since its best."""
    best, last = run.facts.best, run.validation.last("valid_loss")
    if best is not None and last is not None and last > best[0] * 1.01:
        yield f"The validation loss is {last:.4g} now, and was best at step {best[1]:,} with {best[0]:.4g}."


def _slowest(run: Recorded) -> Iterator[str]:
    """Name a rank that is the slowest in most of the lines that tell it."""
    ranks = run.steps.values("iteration_time_s/slowest_rank")
    work, time = run.steps.values("iteration_time_s/slowest_rank_work"), _busy(run)
    if len(ranks) < 3:
        return
    rank = statistics.mode(ranks)
    share = ranks.count(rank) / len(ranks)
    beyond = statistics.median(work) / time if time else 0.0
    if share >= 0.6 and beyond > 1.1:
        yield (
            f"Rank {rank:.0f} was the slowest in {share_text(share)} of the measurements, with "
            f"{share_text(beyond - 1)} more work than the median rank."
        )


def _busy(run: Recorded) -> float:
    """Return the seconds of a step that the median rank works."""
    names = ("data", "forward_and_backward", "optimizer")
    return sum(median(run.steps.values(f"iteration_time_s/{name}")) or 0.0 for name in names)


def _pauses(run: Recorded) -> Iterator[str]:
    """Say what took the time that steps did not take, if that is much."""
    share = run.facts.share("steps")
    if share is not None and sum(run.facts.spent.values()) > 60 and share < 0.8:
        lost = sorted(((value, cause) for cause, value in run.facts.spent.items() if cause != "steps"), reverse=True)
        shares = [(cause, run.facts.share(cause) or 0.0) for _, cause in lost]
        parts = [f"{cause} {share_text(share)}" for cause, share in shares if share >= 0.01]
        yield f"Steps took {share_text(share)} of the time ({', '.join(parts)})."


@dataclass(frozen=True)
class Waits:
    """Waits of ranks on an axis, over the lines that tell them. Shares are of these lines.

    Attributes:
        seconds: mean seconds of a step that the median rank waits.
        longest: mean seconds that the rank waits that waits longest.
        waiting: the rank that most often waits longest, and its share.
        awaited: the rank for which the others wait, as it most often waits least, and its share; None: it is not told.
    """

    axis: str
    seconds: float
    longest: float
    waiting: tuple[int, float]
    awaited: tuple[int, float] | None


def waits(run: Recorded) -> list[Waits]:
    """Return the waits of a run by axis, the longest first."""
    steps, found = run.steps, []
    for key in steps.columns:
        _, _, axis = key.partition("wait_s/")
        longest, ranks = steps.values(f"{key}/max"), _most_often(steps.values(f"{key}/max_rank"))
        if axis and "/" not in axis and len(longest) and ranks is not None:
            awaited = _most_often(steps.values(f"{key}/min_rank"))
            found.append(Waits(axis, fmean(steps.values(key)), fmean(longest), ranks, awaited))
    return sorted(found, key=lambda each: -each.longest)


def _most_often(ranks: Sequence[float]) -> tuple[int, float] | None:
    if not ranks or not all(map(math.isfinite, ranks)):
        return None
    rank = statistics.mode(ranks)
    return int(rank), ranks.count(rank) / len(ranks)


def _waiting(run: Recorded) -> Iterator[str]:
    """Say who waits for whom, if that is much of a step and mostly the same rank."""
    step = median(run.steps.values("iteration_time_s"))
    for each in waits(run):
        if each.awaited is not None and step and each.longest >= 0.1 * step and each.awaited[1] >= 0.6:
            yield (
                f"On {printable(each.axis)}, ranks wait for rank {each.awaited[0]} in {share_text(each.awaited[1])} of "
                f"the measurements, up to {share_text(each.longest / step)} of a step: rank {each.waiting[0]} the most."
            )


def share_text(share: float) -> str:
    """Return a share as text: "12 %", "less than 1 %"."""
    return "less than 1 %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def counted(number: int, what: str) -> str:
    """Return a number with its noun: "1 step", "2 steps"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def thinned(values: array[float], most: int) -> list[int]:
    """Return the places of at most about `most` values, so that a curve through them shows each peak and valley.

    Of each of most / 2 equal parts these are the least and the greatest value; besides, the first and the last. Values
    that are not finite are left out.
    """
    size = len(values)
    if size <= most:
        return [place for place, value in enumerate(values) if math.isfinite(value)]
    parts = max(1, most // 2)
    chosen: set[int] = set()
    for part in range(parts):
        start, end = part * size // parts, (part + 1) * size // parts
        piece = values[start:end]
        if not math.isfinite(sum(piece)):
            finite = [(value, place) for place, value in enumerate(piece) if math.isfinite(value)]
            if finite:
                chosen |= {start + min(finite)[1], start + max(finite)[1]}
            continue
        chosen |= {start + piece.index(min(piece)), start + piece.index(max(piece))}
    chosen |= {place for place in (0, size - 1) if math.isfinite(values[place])}
    return sorted(chosen)


def means(values: array[float], parts: int) -> list[tuple[int, float]]:
    """Return the mean of the finite values of each of some equal parts, with the number of the part.

    There are no more parts than values.
    """
    size = len(values)
    parts = min(parts, size)
    pieces = [values[part * size // parts : (part + 1) * size // parts] for part in range(parts)]
    finite = [[value for value in piece if math.isfinite(value)] for piece in pieces]
    return [(part, sum(each) / len(each)) for part, each in enumerate(finite) if each]

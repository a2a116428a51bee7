"""Verdict on a disturbed run, beside the undisturbed one of the same command."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite.extras.chaos.plan import Results
from megalite.extras.chaos.trial import Trial


@dataclass(frozen=True)
class Verdict:
    """Verdict on a disturbed run: kept and lost.

    Attributes:
        faults: each fault of the schedule, with the seconds to the next step (null: no step followed) and whether it
            occurred.
        finished: the run came to its end.
        same_records: all lines of the records have the bits of the undisturbed run.
        same_weights: so have the final weights.
        every_step_once: the records have each step once, in order, and the samples that it consumes.
        repeated: steps that were computed more than once.
        hung, processes_left, memory_left: as `Trial` has them.
        why: a line for each thing that does not hold.
    """

    faults: list[dict[str, Any]]
    finished: bool
    same_records: bool
    same_weights: bool
    every_step_once: bool
    repeated: int
    hung: bool
    processes_left: list[str]
    memory_left: list[str]
    seconds: float
    why: list[str]

    @property
    def holds(self) -> bool:
        """True if nothing is lost and nothing is left behind."""
        return not self.why


def judge(trial: Trial, undisturbed: Trial, results: Results) -> Verdict:
    """Compare a disturbed run with the undisturbed one."""
    ours, theirs = (read_records(each.run / results.records, results) for each in (trial, undisturbed))
    weights = compare_weights(trial.run, undisturbed.run, results.weights)
    steps = step_problem(ours, theirs, results)
    records = record_problem(ours, theirs, results)
    finished = not trial.hung and not trial.given_up and bool(trial.codes) and trial.codes[-1] == 0
    faults = [
        {**asdict(fault), "text": str(fault), "occurred": number in trial.occurred, "recovery": trial.recovery(number)}
        for number, fault in enumerate(trial.faults)
    ]
    why = [
        *([f"it hung: nothing happened after {_last(trial)}"] if trial.hung else []),
        *([f"it did not finish: {trial.given_up}"] if trial.given_up else []),
        *filter(None, (steps, records, weights)),
        *(f"a process was left: {each}" for each in trial.processes_left),
        *(f"shared memory was left: /dev/shm/{each}" for each in trial.memory_left),
    ]
    return Verdict(
        faults,
        finished,
        not records,
        not weights,
        not steps,
        trial.repeated(),
        trial.hung,
        trial.processes_left,
        trial.memory_left,
        trial.seconds,
        why,
    )


def _last(trial: Trial) -> str:
    last = trial.records[-1] if trial.records else None
    return "the start" if last is None else f"a {last['record']} of rank {last['rank']} (process {last['process']})"


def read_records(path: Path, results: Results) -> list[dict[str, Any]]:
    """Return the lines of the records as far as they can be read, without values that depend on the machine."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
        except ValueError:
            values = {"unreadable": line}
        found.append({k: v for k, v in values.items() if not any(part in k for part in results.ignored)})
    return found


def record_problem(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], results: Results) -> str:
    """Return the first difference between records, "" if they have the same bits."""
    for number, (own, other) in enumerate(zip(ours, theirs, strict=False), 1):
        for key in own.keys() | other.keys():
            if repr(own.get(key)) != repr(other.get(key)):  # repr: tells -0.0 from 0.0, and takes NaN for NaN
                where = f"line {number} of {results.records}, step {other.get(results.number)}"
                return f"other bits: {where}: {key} is {own.get(key)!r:.40}, undisturbed {other.get(key)!r:.40}"
    return "" if len(ours) == len(theirs) else f"{results.records} has {len(ours)} lines, undisturbed {len(theirs)}"


def step_problem(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], results: Results) -> str:
    """Return why the records are no ledger with every step, and so every sample, exactly once; "" if they are."""
    steps, expected = ([line for line in lines if results.loss in line] for lines in (ours, theirs))
    numbers, wanted = ([line.get(results.number) for line in lines] for lines in (steps, expected))
    for number in wanted:
        if numbers.count(number) != 1:
            return f"step {number} is {'missing' if number not in numbers else 'repeated'} in {results.records}"
    if numbers != wanted:
        return f"{results.records} has steps {numbers!r:.60}, undisturbed {wanted!r:.60}"
    for own, other in zip(steps, expected, strict=True) if results.samples else ():
        if own.get(results.samples) != other.get(results.samples):
            return (
                f"step {own.get(results.number)} ends at sample {own.get(results.samples)}, undisturbed at "
                f"{other.get(results.samples)}: samples are lost or repeated"
            )
    return ""


def compare_weights(ours: Path, theirs: Path, pattern: str) -> str:
    """Return the first difference between the final weights, "" if they have the same bytes."""
    own, other = ({path.relative_to(run): path for path in _last_files(run, pattern)} for run in (ours, theirs))
    if own.keys() != other.keys() or not other:
        missing = sorted(map(str, other.keys() - own.keys())) or ["more files, or none"]
        return f"the final weights differ: {missing[0]} (of {pattern})"
    for name, path in sorted(other.items()):
        if path.read_bytes() != own[name].read_bytes():
            return f"the final weights differ: {name}"
    return ""


def _last_files(run: Path, pattern: str) -> list[Path]:
    files = sorted(path for path in run.glob(pattern) if path.is_file())
    return [path for path in files if path.parent == files[-1].parent]


def quantiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return number, median, 95th percentile (of the sample, no interpolation) and maximum; None without any."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "median": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "most": ordered[-1],
    }


def summary(undisturbed: Trial, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return all verdicts and what they add up to, as JSON values."""
    seconds = [f["recovery"] for verdict in verdicts for f in verdict.faults if f["recovery"] is not None]
    occurred = sum(fault["occurred"] for verdict in verdicts for fault in verdict.faults)
    return {
        "holds": all(verdict.holds for verdict in verdicts),
        "trials": len(verdicts),
        "faults": sum(len(verdict.faults) for verdict in verdicts),
        "occurred": occurred,
        "unfinished": sum(not verdict.finished for verdict in verdicts),
        "hung": sum(verdict.hung for verdict in verdicts),
        "other_records": sum(not verdict.same_records for verdict in verdicts),
        "other_weights": sum(not verdict.same_weights for verdict in verdicts),
        "steps_lost_or_doubled": sum(not verdict.every_step_once for verdict in verdicts),
        "repeated": sum(verdict.repeated for verdict in verdicts),
        "processes_left": sum(len(verdict.processes_left) for verdict in verdicts),
        "memory_left": sum(len(verdict.memory_left) for verdict in verdicts),
        "recovery_seconds": quantiles(seconds),
        "undisturbed_seconds": undisturbed.seconds,
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def shown(found: Mapping[str, Any]) -> list[str]:
    """Return the lines that a person reads at the end."""
    recovery = found["recovery_seconds"]
    seconds = (
        f"{recovery['median']:.2f} s in the median, {recovery['p95']:.2f} at the 95th percentile, at most "
        f"{recovery['most']:.2f}, of {recovery['count']}"
        if recovery
        else "none"
    )
    rows = {
        "trials": f"{found['trials']}, with {found['occurred']} faults that occurred of {found['faults']}",
        "not finished": f"{found['unfinished']}, {found['hung']} of them hung",
        "other bits": f"{found['other_records']} in the records, {found['other_weights']} in the final weights",
        "steps lost or doubled": str(found["steps_lost_or_doubled"]),
        "steps repeated": str(found["repeated"]),
        "left behind": f"{found['processes_left']} processes, {found['memory_left']} of shared memory",
        "fault to the next step": seconds,
        "verdict": "all of it holds" if found["holds"] else "does not hold",
    }
    return [f"{name:<24}{value}" for name, value in rows.items()]

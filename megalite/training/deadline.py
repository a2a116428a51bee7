"""Whether another step still fits before SLURM ends the job.

Rank 0 decides, by its clock; how long steps, evaluations and saves take, it has seen in this run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

VARIABLE = "SLURM_JOB_END_TIME"
MARGIN = 15.0
"""Seconds for all else: the message that ranks stop, the end of their processes."""
SAVES = 2.0
"""The last save may take so many times as long as the longest before: another job may be using the file system."""


@dataclass(frozen=True)
class Pace:
    """The longest that a step and an evaluation have taken in this run, in seconds."""

    steps: int = 0
    step: float = 0.0
    evaluation: float = 0.0

    def after_step(self, seconds: float) -> Pace:
        """The first step compiles and fills caches: it counts for as long as there is no other."""
        longest = seconds if self.steps < 2 else max(self.step, seconds)
        return replace(self, steps=self.steps + 1, step=longest)

    def after_evaluation(self, seconds: float) -> Pace:
        return replace(self, evaluation=max(self.evaluation, seconds))


def job_end(environment: Mapping[str, str], now: float) -> tuple[float | None, str | None]:
    """When the job ends, in Unix seconds, and a note where what the environment says is of no use.

    A job that runs beyond its end is not ended by it: the variable is of another job, whose shell this one inherits.
    """
    text = environment.get(VARIABLE)
    if text is None:
        return None, None
    if not text.isdigit():
        return None, f"{VARIABLE}={text} is no time in Unix seconds: the run does not stop by it"
    if float(text) < now:
        return None, f"{VARIABLE}={text} is over: the run does not stop by it"
    return float(text), None


def why_stop(left: float, pace: Pace, *, evaluates: bool, save: float) -> str | None:
    """Why the run must stop now, `left` seconds before the job ends, None where another step fits in.

    Args:
        evaluates: whether an evaluation is due after that step.
        save: the seconds of a save, 0 where nothing is saved.
    """
    evaluation = pace.evaluation if evaluates else 0.0
    needed = pace.step + evaluation + SAVES * save + MARGIN
    if left >= needed:
        return None
    parts = [f"a step of {pace.step:.1f} s", f"a save of {save:.1f} s"]
    if evaluation:
        parts.insert(1, f"an evaluation of {evaluation:.1f} s")
    return f"the job ends in {left:.0f} s ({VARIABLE}), which may not be enough for {' and '.join(parts)}"

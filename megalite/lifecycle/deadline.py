"""Stop of a run shortly before SLURM ends its job.

Rank 0 decides: it has measured in this run how long steps, evaluations and saves take, and its clock tells the job's
end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "SLURM_JOB_END_TIME"
MARGIN = 15.0
"""Seconds for all else: the message that ranks stop, the end of their processes."""
SAVES = 2.0
"""Duration allowed for the last save, as a multiple of the longest before: another job may be using the file system."""


@dataclass(frozen=True)
class Pace:
    """Longest time that a step has taken in this run, in seconds.

    The first step compiles and fills caches: it counts only as long as there is no other.
    """

    steps: int = 0
    step: float = 0.0

    def after(self, seconds: float) -> Pace:
        """Return the pace after one more step, which took so many seconds."""
        return Pace(self.steps + 1, seconds if self.steps < 2 else max(self.step, seconds))


def job_end(environment: Mapping[str, str], now: float) -> tuple[float | None, str | None]:
    """Return the end of the job, in Unix seconds, and a note if the environment's value is of no use.

    If a job runs beyond that end, the value is not its own: it comes from another job, whose shell this one inherits.
    """
    text = environment.get(VARIABLE)
    if text is None:
        return None, None
    if not (text.isascii() and text.isdigit()):
        return None, f"{VARIABLE}={text} is no time in Unix seconds: the run does not stop by it"
    if float(text) < now:
        return None, f"{VARIABLE}={text} is over: the run does not stop by it"
    return float(text), None


def why_stop(left: float, step: float, evaluation: float, save: float) -> str | None:
    """Return why the run must stop now, `left` seconds before the job ends; None if another step fits in.

    Args:
        step: the seconds of a step.
        evaluation: those of the evaluation that is due after it, 0 if none is.
        save: those of a save, 0 if nothing is saved.
    """
    if left >= step + evaluation + SAVES * save + MARGIN:
        return None
    times = {"a step": step, "an evaluation": evaluation, f"{SAVES:.0f} saves": save}
    parts = [f"{what} of {seconds:.1f} s" for what, seconds in times.items() if seconds]
    return (
        f"the job ends in {left:.0f} s ({VARIABLE}), which may not be enough for {', '.join(parts)} and {MARGIN:.0f} s "
        "to end in"
    )

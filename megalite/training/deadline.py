"""When a run stops by itself because SLURM is about to end the job.

How long steps, evaluations and saves take, rank 0 has seen in this run; of the job's end its clock decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "SLURM_JOB_END_TIME"
MARGIN = 15.0
"""Seconds for all else: the message that ranks stop, the end of their processes."""
SAVES = 2.0
"""The last save may take so many times as long as the longest before: another job may be using the file system."""


@dataclass(frozen=True)
class Pace:
    """The longest that a step has taken in this run, in seconds. The first compiles and fills caches: it counts for as
    long as there is no other."""

    steps: int = 0
    step: float = 0.0

    def after(self, seconds: float) -> Pace:
        """Return the pace after one more step, which took so many seconds."""
        return Pace(self.steps + 1, seconds if self.steps < 2 else max(self.step, seconds))


def job_end(environment: Mapping[str, str], now: float) -> tuple[float | None, str | None]:
    """When the job ends, in Unix seconds, and a note where what the environment says is of no use.

    A job that runs beyond its end is not ended by it: the variable is of another job, whose shell this one inherits.
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
    """Why the run must stop now, `left` seconds before the job ends; None where another step fits in.

    Args:
        step: the seconds of a step.
        evaluation: those of the evaluation that is due behind it, 0 where none is.
        save: those of a save, 0 where nothing is saved.
    """
    if left >= step + evaluation + SAVES * save + MARGIN:
        return None
    times = {"a step": step, "an evaluation": evaluation, f"{SAVES:.0f} saves": save}
    parts = [f"{what} of {seconds:.1f} s" for what, seconds in times.items() if seconds]
    return (
        f"the job ends in {left:.0f} s ({VARIABLE}), which may not be enough for {', '.join(parts)} and {MARGIN:.0f} s "
        "to end in"
    )

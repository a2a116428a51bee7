"""Stop of a run shortly before SLURM ends its job.

Rank 0 decides, from its clock and from the measured durations of steps, evaluations and saves in this run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "SLURM_JOB_END_TIME"
MARGIN = 15.0
"""Seconds for everything else: the agreement of the ranks to stop, and the end of their processes."""
SAVES = 2.0
"""Time allowed for the last save, as a multiple of the longest save so far: the file system may be busy with other
jobs."""


@dataclass(frozen=True)
class Pace:
    """Duration of the longest step of this run, in seconds.

    The first step is slower, because it compiles and fills caches. It counts only until the second step has run.
    """

    steps: int = 0
    step: float = 0.0

    def after(self, seconds: float) -> Pace:
        """Return the pace after one more step, which took `seconds`."""
        return Pace(self.steps + 1, seconds if self.steps < 2 else max(self.step, seconds))


def job_end(environment: Mapping[str, str], now: float) -> tuple[float | None, str | None]:
    """Return the end of the job in Unix seconds, and a note if the value in the environment is not usable.

    A time in the past is not the end of this job: it was inherited from the shell of an earlier job.
    """
    text = environment.get(VARIABLE)
    if text is None:
        return None, None
    if not (text.isascii() and text.isdigit()):
        return None, f"{VARIABLE}={text} is not a time in Unix seconds: it is ignored"
    if float(text) < now:
        return None, f"{VARIABLE}={text} is in the past: it is ignored"
    return float(text), None


def why_stop(left: float, step: float, evaluation: float, save: float) -> str | None:
    """Return why the run must stop now, or None if there is time for another step.

    Args:
        left: seconds until the job ends.
        step: seconds of a step.
        evaluation: seconds of the evaluation that is due after the step; 0 if none is due.
        save: seconds of a save; 0 if nothing is saved.
    """
    if left >= step + evaluation + SAVES * save + MARGIN:
        return None
    times = {"a step": step, "an evaluation": evaluation, f"{SAVES:.0f} saves": save}
    parts = [f"{what} of {seconds:.1f} s" for what, seconds in times.items() if seconds]
    return (
        f"the job ends in {left:.0f} s ({VARIABLE}), which may not be enough for {', '.join(parts)} and {MARGIN:.0f} s "
        "to exit"
    )

"""Seconds of a run by what they were spent on, from the records of metrics.jsonl alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CAUSES = ("steps", "data", "evaluations", "saves", "start", "restarts", "other")
"""Causes for which a run spends time: `steps` is its goodput."""


def seconds_by_cause(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds that a run has spent on each of `CAUSES`, until its last record.

    What lies between two records is all that was spent on the second one. A restart is from the record before it to the
    first step after it: steps that were run again, the time without a process, and the start. What no record tells is
    `other`: agreement of ranks, profiles, garbage, and what a program does between steps. Records without `wall_time`
    are left out.
    """
    spent = dict.fromkeys(CAUSES, 0.0)
    before: float | None = None
    for record in records:
        if (written := record.get("wall_time")) is None:
            continue
        data, start = record.get("data_time_s", 0.0), record.get("start_time_s", 0.0)
        own = {
            "steps": record.get("iteration_time_s", 0.0) - data,
            "data": data,
            "evaluations": record.get("evaluation_time_s", 0.0),
            "saves": record.get("save_time_s", 0.0),
        }
        if before is None:
            own["start"] = start
        else:
            rest = max(written - before - sum(own.values()), 0.0)  # a clock may be set back
            own["restarts" if start else "other"] = rest
        for cause, seconds in own.items():
            spent[cause] += seconds
        before = written
    return spent

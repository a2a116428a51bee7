"""Facts of a run that follow from its records alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

CAUSES = ("steps", "data", "evaluations", "saves", "start", "restarts", "other")
"""Causes for which a run spends time: `steps` is its goodput."""
LARGEST = 1e100
"""Numbers beyond it count as infinite: sums of others are finite."""
_MEANS = ("tokens_per_second", "samples_per_second", "mfu")
_KEYS = (
    *("iteration", "consumed_samples", "consumed_tokens", "skipped", "valid_loss", "test_loss", *_MEANS),
    *("peak_memory_bytes", "peak_memory_bytes/max", "peak_memory_bytes/max_rank", "predicted_memory_bytes"),
    *("scaling_efficiency", "communication_share", "wall_time", "iteration_time_s", "data_time_s"),
    *("evaluation_time_s", "save_time_s", "start_time_s"),
)


def number(value: object) -> float | None:
    """Return a number of a record, which may be a truth value or one of the texts for what is not finite."""
    if isinstance(value, bool | int | float):
        return float(value) if not abs(value) > LARGEST else math.inf if value > 0 else -math.inf
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return None


def loss_of(record: Mapping[str, Any]) -> str:
    """Return the key of the loss of a step: it follows the counts (docs/operations.md)."""
    counts = {"iteration", "consumed_samples", "consumed_tokens"}
    return next((key for key in record if key not in counts), "")


class Facts:
    """Facts of a run from the records that `add` is given, in the order of the file.

    Attributes:
        loss: the key of its loss; "" before the first step.
        first, last: numbers of the first step and of the last one, by their keys.
        skipped: number of steps that were skipped.
        spent: seconds that the run has spent on each of `CAUSES`, until its last record.
        restarts: the step of the first record after each start but that of the run.
        best: the least validation loss, and the step before it.
        test_loss: the loss on test data.
        peak: the most memory of a rank, in bytes, and the rank.
        predicted: the memory that the last start has counted, in bytes.
        efficiency: the share of a step that ranks work, and that in which all wait, as they were last measured.
        written: when the last record was written, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.loss, self.skipped = "", 0
        self.first: Mapping[str, float] = {}
        self.last: Mapping[str, float] = {}
        self.spent = dict.fromkeys(CAUSES, 0.0)
        self.restarts: list[int] = []
        self.best: tuple[float, int] | None = None
        self.test_loss: float | None = None
        self.peak: tuple[float, int] | None = None
        self.predicted: float | None = None
        self.efficiency: tuple[float, float] | None = None
        self.written: float | None = None
        self._means = dict.fromkeys(_MEANS, (0.0, 0.0))
        self._is_first = True

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the next record, of any kind."""
        told = {key: found for key in _KEYS if key in record and (found := number(record[key])) is not None}
        step = record["iteration"]
        if "start_time_s" in told and not self._is_first:
            self.restarts.append(step)
        self._is_first = False
        self.predicted = told.get("predicted_memory_bytes", self.predicted)
        self.test_loss = told.get("test_loss", self.test_loss)
        loss = told.get("valid_loss", math.nan)
        if math.isfinite(loss) and (self.best is None or loss < self.best[0]):
            self.best = loss, step
        if "grad_norm" in record:
            self._add_step(record, told)
        self._spend({key: value for key, value in told.items() if math.isfinite(value)})

    def _add_step(self, record: Mapping[str, Any], told: Mapping[str, float]) -> None:
        """Take the record of a step. `told`: its numbers."""
        self.loss = self.loss or loss_of(record)
        self.last = {**told, "loss": found} if (found := number(record.get(self.loss))) is not None else told
        self.first = self.first or self.last
        self.skipped += told.get("skipped", 0.0) > 0
        own, most = told.get("peak_memory_bytes"), told.get("peak_memory_bytes/max")
        if own is not None and (self.peak is None or own > self.peak[0]):
            self.peak = own, 0
        if most is not None and (self.peak is None or most >= self.peak[0]):
            self.peak = most, int(told.get("peak_memory_bytes/max_rank", 0))
        if "scaling_efficiency" in told and "communication_share" in told:
            self.efficiency = told["scaling_efficiency"], told["communication_share"]
        seconds = told.get("iteration_time_s", 0.0)
        for key, (total, time) in self._means.items():
            value = told.get(key, math.nan)
            if math.isfinite(value * seconds):
                self._means[key] = total + value * seconds, time + seconds

    def mean(self, key: str) -> float | None:
        """Return the mean of a speed over the time of the steps that have it; None if none has it."""
        total, time = self._means[key]
        return total / time if time > 0 else None

    def share(self, cause: str) -> float | None:
        """Return the share of the run's time that a cause has taken; None if no time is told."""
        total = sum(self.spent.values())
        return self.spent[cause] / total if total > 0 else None

    def _spend(self, told: Mapping[str, float]) -> None:
        """Add the seconds between the record before and this one, as all were spent on this one.

        A restart is from the record before it to the first step after it: steps that were run again, the time without a
        process, and the start. What no record tells is `other`: agreement of ranks, profiles, garbage, and what a
        program does between steps. Records without `wall_time` are left out.
        """
        if (written := told.get("wall_time")) is None:
            return
        data, start = told.get("data_time_s", 0.0), told.get("start_time_s", 0.0)
        own = {
            "steps": told.get("iteration_time_s", 0.0) - data,
            "data": data,
            "evaluations": told.get("evaluation_time_s", 0.0),
            "saves": told.get("save_time_s", 0.0),
        }
        if self.written is None:
            own["start"] = start
        else:
            rest = max(written - self.written - sum(own.values()), 0.0)  # a clock may be set back
            own["restarts" if start else "other"] = rest
        for cause, seconds in own.items():
            self.spent[cause] += seconds
        self.written = written

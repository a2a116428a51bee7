"""Interface of monitors, implemented in `megalite/extras/monitors`: what the loop calls after each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megalite.training.metrics import StepMetrics


@dataclass(frozen=True)
class Observation:
    """Result of a look at a step."""

    figures: Mapping[str, float] = field(default_factory=dict)
    """Figures for the record of the step."""
    lines: Sequence[str] = ()
    """Lines for the screen."""


class Monitor(Protocol):
    """Watcher of a run."""

    def after_step(self, metrics: StepMetrics) -> Observation:
        """Look at a step, of which `metrics` is the record so far. Called by all ranks together."""

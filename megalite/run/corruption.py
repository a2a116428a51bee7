"""Interface of the search for silent corruption, implemented in `megalite/extras/corruption`: what the loop calls."""

from __future__ import annotations

from typing import Protocol

from megalite.training.metrics import StepMetrics

SICK_NODES = "sick_nodes.jsonl"
"""File of the run directory with a line for each rank that was found to be wrong: its node, its number, why, when."""


class Watch(Protocol):
    """Search for silent corruption (megalite/extras/corruption/watch.py)."""

    def step(self) -> StepMetrics:
        """Run a step of the trainer, with the checks that are due. Raises MegaliteError if one of them fails."""

    def after_skip(self, report: str) -> str:
        """Compute the step that was skipped last on other replicas. Returns the report on it with the verdict."""

"""Interface of alarms about single steps: what a trainer and its loop call. `megalite/extras/alarms` implements it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from megalite.optim.optimizer import StepResult
from megalite.training.gradients import Gradients


class Alarms(Protocol):
    """Alarms about the steps of a trainer. All methods are called by all ranks together."""

    def judge(self, gradients: Gradients, result: StepResult) -> StepResult:
        """Return the result of a step before its update, or one that refuses the update."""

    def after_step(self, loop: Any, *, may_go_back: bool) -> bool:
        """Report on the step that has ended. Returns True if the run has gone back to an earlier one.

        Args:
            loop: the loop (`TrainingLoop`), which shows and records.
            may_go_back: False if the program of the user gives the batches.
        """

    def saved(self) -> dict[str, Any]:
        """Return the section of a checkpoint's configuration that later judgements depend on."""

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over that section from a checkpoint's configuration."""

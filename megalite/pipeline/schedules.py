"""Pure functions from a number of micro-batches to a rank's list of actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """One thing a rank does to one micro-batch: F runs the stage forward, B runs it backward."""

    kind: Literal["F", "B"]
    micro_batch: int


def no_pipelining(micro_batches: int) -> list[Action]:
    """A single stage: each micro-batch forward, then backward, so that one micro-batch's activations live at a time."""
    return [action for m in range(micro_batches) for action in (Action("F", m), Action("B", m))]


def forward_only(micro_batches: int) -> list[Action]:
    """Evaluation."""
    return [Action("F", m) for m in range(micro_batches)]

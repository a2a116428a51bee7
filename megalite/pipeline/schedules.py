"""Pure functions from a number of micro-batches to a rank's list of actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """One thing a rank does with one micro-batch.

    F runs the stage forward, B backward. R reduces, over the data-parallel ranks, the gradients that are whole once the
    micro-batch has gone backward: behind it the reduction of every bucket concerned has begun. Those that overlap
    backward, and under ZeRO 2 and 3 all, begin inside its B, bucket by bucket in a fixed order.
    """

    kind: Literal["F", "B", "R"]
    micro_batch: int


def no_pipelining(micro_batches: int, *, reduce_each: bool = False) -> list[Action]:
    """A single stage: each micro-batch forward, then backward, so that one micro-batch's activations live at a time.

    Gradients are reduced behind the last, or with `reduce_each` (ZeRO 2 and 3) behind each.
    """
    actions: list[Action] = []
    for m in range(micro_batches):
        actions += [Action("F", m), Action("B", m)]
        if reduce_each or m == micro_batches - 1:
            actions.append(Action("R", m))
    return actions


def forward_only(micro_batches: int) -> list[Action]:
    """Evaluation."""
    return [Action("F", m) for m in range(micro_batches)]

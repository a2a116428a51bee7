"""Messages between stages: which action needs which, and which gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalite.pipeline.schedules import Action
from megalite.pipeline.stages import Stages


@dataclass(frozen=True, slots=True)
class Message:
    """The tensors (F), or the gradients of its inputs (B), that a stage gives for one micro-batch: see `Stages`."""

    kind: Literal["F", "B"]
    stage: int
    """Stage that gives it; tensors go to the next one, gradients to the one before."""
    micro_batch: int

    def route(self, stages: Stages) -> tuple[int, int]:
        """The ranks that give and take it; they may be the same."""
        taker = self.stage + (1 if self.kind == "F" else -1)
        return stages.place(self.stage)[0], stages.place(taker)[0]


def needed(stages: Stages, rank: int, action: Action) -> Message | None:
    """The message without which an action of `rank` cannot run."""
    stage = stages.stage(rank, action.chunk)
    if action.kind == "F" and stage > 0 and stages.passes(stage - 1):
        return Message("F", stage - 1, action.micro_batch)
    if action.kind in ("B", "I") and stage < stages.count - 1 and stages.passes_back(stage + 1):
        return Message("B", stage + 1, action.micro_batch)
    return None


def given(stages: Stages, rank: int, action: Action) -> Message | None:
    """The message that an action of `rank` gives to another stage."""
    stage = stages.stage(rank, action.chunk)
    if action.kind == "F" and stages.passes(stage):
        return Message("F", stage, action.micro_batch)
    if action.kind in ("B", "I") and stages.passes_back(stage):
        return Message("B", stage, action.micro_batch)
    return None

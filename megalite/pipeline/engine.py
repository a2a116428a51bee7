"""The engine: executes a list of actions on a stage.

A stage is any module from hidden states to hidden states, called `stage(hidden, micro_batch)`; the micro-batch is
opaque to the engine. The last stage returns the sum of its losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from megalite.pipeline.schedules import Action

MicroBatch = TypeVar("MicroBatch")


def run(
    actions: Sequence[Action],
    stage: Callable[[Tensor | None, MicroBatch], Tensor],
    micro_batches: Sequence[MicroBatch],
    factor: float = 1.0,
    reduce: Callable[[int], None] | None = None,
) -> Tensor:
    """Execute `actions`, differentiating factor * (sum of losses); an R calls `reduce`, where there is
    any, with the number of micro-batches that have gone backward.

    Returns the unscaled sum of the losses, detached, in fp64 so that it does not depend on the split into micro-batches
    beyond the stage's own rounding.
    """
    backward = any(action.kind == "B" for action in actions)
    losses: dict[int, Tensor] = {}
    total: Tensor | None = None
    with torch.set_grad_enabled(backward):
        for action in actions:
            if action.kind == "F":
                loss = stage(None, micro_batches[action.micro_batch])
                total = loss.detach().double() if total is None else total + loss.detach().double()
                if backward:
                    losses[action.micro_batch] = loss
            elif action.kind == "B":
                (losses.pop(action.micro_batch) * factor).backward()
            elif reduce is not None:
                reduce(action.micro_batch + 1)
    if total is None:
        raise ValueError("a schedule without a forward action has no loss")
    return total

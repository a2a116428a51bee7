"""Gradients of a step between the two halves of it, and the undoing of what its forward has changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megalite.modules.forward_state import Copies
from megalite.parallel.stage import LossTerm, TermSums
from megalite.pipeline.schedules import Action
from megalite.training.loss_terms import Totals


@dataclass(frozen=True)
class Gradients:
    """Gradients of a global batch, which are in the optimizer's buffers, and what they were computed from."""

    began: float
    """Start of the step, as `time.perf_counter` in seconds."""
    bytes_sent: Mapping[str, int]
    """Number of bytes that this rank had sent by then, by axis."""
    batch_size: int
    micro_batches: Sequence[Any]
    actions: Sequence[Action]
    terms: Sequence[LossTerm]
    counts: Totals
    """Counts of the terms over the global batch."""
    multipliers: Mapping[str, float]
    loss_scale: float
    sums: TermSums
    """Sums of the terms on this rank."""
    before: Copies | None
    """Copies of what forward may change, from before the step; None if it can change nothing."""

    def undo_forward_if(self, skipped: bool) -> None:
        """Undo what forward has changed beside gradients if the step is skipped."""
        if skipped and self.before is not None:
            self.before.restore()


@contextmanager
def undone_by_error(before: Copies | None) -> Iterator[None]:
    """Undo what the forward of a step has changed beside gradients, if the block fails."""
    try:
        yield
    except BaseException:
        if before is not None:
            before.restore()
        raise

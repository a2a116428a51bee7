"""Options of the cross entropy: a rank's columns of the logits, and what is added to the plain loss."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Columns:
    """The vocabulary entries on one rank: `first`, `first` + 1, ... Columns from `valid` on are padding."""

    first: int
    valid: int
    vocab_size: int
    """V, over all ranks."""

    @staticmethod
    def of_rank(rank: int, width: int, vocab_size: int) -> Columns:
        """Return a rank's columns if each rank has `width` of them, in rank order."""
        return Columns(rank * width, min(max(vocab_size - rank * width, 0), width), vocab_size)


@dataclass(frozen=True)
class LossOptions:
    """Options that change the loss from the plain cross entropy of the logits."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None

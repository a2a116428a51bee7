"""Options of the search for silent corruption: devices and memories that give wrong numbers without an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalite.config.fields import PositiveInt


@dataclass(frozen=True)
class CorruptionConfig:
    """Options of the search for silent corruption."""

    check_weight_hash_across_dp_replicas_interval: PositiveInt | None = None
    """Steps between comparisons of the bits of all weights that several ranks hold, before their update; unset:
    none."""
    rerun_on_replica_interval: PositiveInt | None = None
    """Steps between two steps whose gradients another data-parallel replica computes, too, and compares; a step whose
    gradient is not finite is then also compared. Unset: none."""
    on_corruption: Literal["end", "go-back"] = "end"
    """Once numbers are wrong: end for good (exit code 93); or go-back: end with 85, and have --resume auto continue
    from the newest checkpoint from before the last check that found nothing."""

    check_gradient_sync_interval: PositiveInt | None = None
    """Steps between two whose gradients are checked once they are reduced, before the update: those that several ranks
    hold are compared, and those of one bucket, in turn, are added up again in another way. Unset: none."""

    @property
    def is_watched(self) -> bool:
        """True if the run searches for it."""
        return self.finds_right_steps or self.check_gradient_sync_interval is not None

    @property
    def finds_right_steps(self) -> bool:
        """True if a check that finds nothing says that the steps before it were right."""
        return (
            self.check_weight_hash_across_dp_replicas_interval is not None or self.rerun_on_replica_interval is not None
        )

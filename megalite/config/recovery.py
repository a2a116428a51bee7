"""Options of recovery: what a run does when a rank fails, without its launcher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megalite.config.checkpoint import CheckpointConfig, is_url
from megalite.config.fields import NonNegativeInt, PositiveInt, needs


@dataclass(frozen=True)
class RecoveryConfig:
    """Options of recovery from the failure of a rank."""

    warm_restart: bool = False
    """Start all ranks again when one fails, within the same job, from processes that have imported everything."""
    memory_checkpoint_interval: NonNegativeInt | None = None
    """Steps between copies of a rank's state in the host's memory, its own and that of a partner on another node; 0:
    no copies. By default, so many that copies take less than 3% of a step's time, as measured."""
    memory_checkpoint_partner: PositiveInt = 1
    """Number of nodes from a rank to its partner, which keeps a second copy of its state."""


def recovery_problems(recovery: RecoveryConfig, checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield a line for each relation that does not hold."""
    if not recovery.warm_restart:
        yield from needs(recovery, "memory_checkpoint_interval memory_checkpoint_partner", "--warm-restart")
        return
    if checkpoint.save is None:
        yield "--warm-restart needs --save, the run directory from which ranks that start again continue"
    elif is_url(checkpoint.save):
        yield f"--warm-restart needs a --save that is a folder, not {checkpoint.save}"
    if checkpoint.resume != "auto":
        yield "--warm-restart needs --resume auto: ranks that start again continue from the latest checkpoint"

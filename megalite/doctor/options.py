"""The flags of tools/doctor.py itself; all others are those of the run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """What to look at, and how long."""

    node: bool = False
    """Look at this node alone, within a second or two: for a prolog or a health check."""
    gpus: int | None = None
    """GPUs that each node must have; unset, with --node: what SLURM_GPUS_ON_NODE says."""
    checkpoints: int = 3
    """Checkpoints that the run directory must have room for."""
    max_bytes: int = 2**26
    """The largest message that is timed; 0: time none."""
    seconds: float = 30.0
    """Time for timing messages; the largest sizes are left out where it does not suffice."""
    patience: float = 60.0
    """Seconds after which a rank that has not answered is taken for one that will not."""
    json: str | None = None
    """A file to write everything to that was found."""

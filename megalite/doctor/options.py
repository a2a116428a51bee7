"""The flags of tools/doctor.py itself; all others are those of the run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Checks to do, and time limits."""

    node: bool = False
    """Check this node alone, within a second or two: for a prolog or a health check."""
    gpus: int | None = None
    """GPUs that each node must have; unset, with --node: the value of SLURM_GPUS_ON_NODE."""
    checkpoints: int = 3
    """Checkpoints that the run directory must have room for."""
    max_bytes: int = 2**26
    """Largest message that is timed, in bytes; 0: time none."""
    seconds: float = 30.0
    """Time in seconds for timing messages; if it is too short, the largest sizes are left out."""
    patience: float = 60.0
    """Seconds after which a rank that has not answered is given up."""
    json: str | None = None
    """File to write all findings to."""

"""Where the run is saved and what it continues from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading."""

    save: str | None = None
    """The run directory: checkpoints, config.yaml, metrics.jsonl, logs."""
    save_interval: int | None = None
    """Steps between checkpoints; unset: only at the end and on exit."""
    load: str | None = None
    """Run directory whose latest checkpoint the run starts from, if it holds one."""
    resume: Literal["auto"] | None = None
    """auto: continue from the latest checkpoint under save where there is one, else from load, else anew."""

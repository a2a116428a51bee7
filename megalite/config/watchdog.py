"""Options for ending a run that hangs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WatchdogConfig:
    """Watchdog: finds a run that hangs, says which rank is missing, and ends it."""

    watchdog: bool = True
    """End a run that hangs, and name a rank that dies. A debugger's breakpoint looks like a hang: off, then."""
    watchdog_min_seconds: float = 120.0
    """A section of a run (data, step, evaluation, ...) hangs after five times the longest so far, but not before."""
    timing_interval: int = 100
    """Steps between lines that say where ranks spend their time, and which is the slowest; 0: none."""

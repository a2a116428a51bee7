"""Measure how a training scales over ranks of this machine, beside what the planner expects."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.extras.comparison.commands.scaling import command

if __name__ == "__main__":
    command()

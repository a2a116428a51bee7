"""Find the fastest layouts of a run on a cluster that fit, before it starts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.extras.planner.commands.plan import command

if __name__ == "__main__":
    command()

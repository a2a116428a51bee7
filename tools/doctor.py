"""Check whether nodes are fit for a run, before it begins: prints a verdict, and which nodes to leave out."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.extras.doctor.commands.doctor import command

if __name__ == "__main__":
    command()

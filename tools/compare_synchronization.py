"""Train one small model under each method of synchronization, and compare what they cost."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.extras.comparison.commands.compare_synchronization import command

if __name__ == "__main__":
    command()

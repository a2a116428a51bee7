"""Disturb a command with faults, and tell what it loses."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.extras.chaos.commands.chaos import command

if __name__ == "__main__":
    command()

"""Verify a step of any trainer: what should have come out, and the first tensor that differs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.extras.verify.commands.verify import command

if __name__ == "__main__":
    command()

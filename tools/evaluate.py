"""Measure how well a model predicts text, what it finds in long texts, and its results in the tasks of lm_eval."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.commands.evaluate import command

if __name__ == "__main__":
    command()

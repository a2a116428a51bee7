"""Tokenize a corpus into the .bin and .idx files that training reads."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.commands.preprocess import command

if __name__ == "__main__":
    command()

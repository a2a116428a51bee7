"""Translate a launch script of Megatron-LM, or settings of DeepSpeed, into megalite's flags."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.extras.translation.commands.translate import command

if __name__ == "__main__":
    command()

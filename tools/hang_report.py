"""Find out why a run hung, from the files of its ranks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.commands.hang_report import command

if __name__ == "__main__":
    command()

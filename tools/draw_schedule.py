"""Draw a pipeline schedule as a picture or a trace, from assumed or from measured times."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.commands.draw_schedule import command

if __name__ == "__main__":
    command()

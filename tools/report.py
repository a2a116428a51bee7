"""Show runs as one page: curves, figures, what happened, and the configuration."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.extras.report.commands.report import command

if __name__ == "__main__":
    command()

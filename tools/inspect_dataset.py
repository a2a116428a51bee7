"""Look into a token file, or at a sample of a training run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.commands.inspect_dataset import command

if __name__ == "__main__":
    command()

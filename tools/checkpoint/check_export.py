"""Show that other programs load an exported Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path

# The folder of this file, which Python puts first, has an `inspect` that hides the standard library's: to the end.
sys.path.append(sys.path.pop(0))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megalite.commands.check_export import command

if __name__ == "__main__":
    command()

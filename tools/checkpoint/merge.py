"""Average the weights of checkpoints of one run, or of branches of it."""

from __future__ import annotations

import sys
from pathlib import Path

# Python puts the folder of this file first in sys.path. Its inspect.py would hide the standard library's `inspect`, so
# the folder is moved to the end.
sys.path.append(sys.path.pop(0))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megalite.extras.averages.commands.merge_checkpoints import command

if __name__ == "__main__":
    command()

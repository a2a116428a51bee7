"""Record of an error for torchrun, which prints it as the root cause of the failure, in its last lines.

torchrun names a file for each rank, `.../attempt_0/LOCAL_RANK/error.json`. The ranks of a node also see by these files
that one of them has reported, which they cannot learn from a store before they are connected.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from megalite.atomic_files import write_at_once
from megalite.errors import FileError

VARIABLE = "TORCHELASTIC_ERROR_FILE"
GRACE_SECONDS = 30
"""Seconds after which torchrun kills the ranks that it has asked to end."""


def record(message: str) -> bool:
    """Write the error of this rank. Returns false if another rank of the node has reported one in this attempt."""
    path = Path(os.environ.get(VARIABLE, ""))
    if not path.name:
        return True
    attempt = path.parent.parent
    if attempt.name.startswith("attempt_") and any(attempt.glob(f"*/{path.name}")):
        return False
    # torchrun takes the first failure for the root cause and shows it last. It may have seen a rank die before this
    # message explains that; and from then on it gives the others these seconds.
    first = int(time.time()) - GRACE_SECONDS - 1
    data = {"message": {"message": message, "extraInfo": {"timestamp": str(first)}}}
    with suppress(FileError, OSError):
        write_at_once(path, json.dumps(data).encode())
    return True

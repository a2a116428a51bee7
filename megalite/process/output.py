"""What the program prints."""

from __future__ import annotations

import os
import sys


def write_out() -> OSError | None:
    """Write out what the program has printed. Where that cannot be written, on a full disk or to nobody, it is given
    up, and why is returned: else the process would end by that, whatever it has to say and to end with."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None

"""Message for an error of memory that ran out: how much was asked for, for what part of a run, and what takes less."""

from __future__ import annotations

import re
import sys
import traceback
from contextlib import suppress

from megalite.entry_points import entry_point

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ASKED = re.compile(r"allocate (\d+\.?\d*) ?([KMGT]iB|bytes)", re.IGNORECASE)
_PARTS = (
    ("/megalite/pipeline/engine", "the activations of a step"),
    ("/megalite/offload/", "what is offloaded to the host"),
    ("/megalite/optim/buckets", "the weights or their gradients"),
    ("/megalite/optim/", "the optimizer's state"),
    ("/megalite/checkpoint/", "a checkpoint"),
    ("/megalite/data/", "the data"),
    ("/megalite/model/", "the weights"),
    ("/megalite/modules/", "the weights"),
)
"""Folders and files by what their tensors are; the first one here that the traceback passes through says it."""
_SMALLER = (
    "Before a run, --dry-run shows what a rank holds, and megalite-plan which layouts fit. Activations take less with "
    "a smaller --micro-batch-size or --recompute-granularity full, the weights with --tp or --pp, gradients and the "
    "optimizer's state with --data-parallel-sharding-strategy (ZeRO) on more ranks or with --optimizer-cpu-offload; "
    "what that puts on the host takes less with a smaller --optimizer-offload-fraction"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out, of a device or of this machine."""
    by_torch = type(error).__name__ == "OutOfMemoryError"  # compared by name: torch may not be imported
    return by_torch or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def describe_out_of_memory(error: BaseException) -> str:
    """Return the message for such an error."""
    where = "this device" if type(error).__name__ == "OutOfMemoryError" else "this machine"
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    part = next((f", for {what}" for name, what in _PARTS if any(name in file for file in files)), "")
    return f"{where} is out of memory{_asked(str(error))}{part}: {error}\n{_SMALLER}.\n{_largest()}{innermost(error)}"


def _largest() -> str:
    """Return a line with the largest tensors of this process, if it has torch and there is memory left to look."""
    if "torch" in sys.modules:
        with suppress(Exception):
            return f"{entry_point('largest_tensors')()}\n".lstrip()
    return ""


def innermost(error: BaseException) -> str:
    """Return the place where the error was raised: the last lines of its traceback before the message."""
    return "".join(traceback.format_tb(error.__traceback__)[-1:]).rstrip()


def _asked(message: str) -> str:
    """Return how much memory was asked for, or nothing if the message does not say it."""
    if (found := _ASKED.search(message)) is None:
        return ""
    size = float(found[1]) * _UNITS.get(found[2], 1)
    unit = next(unit for unit in reversed(_UNITS) if size >= _UNITS[unit] or not unit)
    return f" ({size / _UNITS[unit]:.3g} {unit or 'bytes'} were asked for)"

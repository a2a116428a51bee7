"""Names of what runs, for a profile of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from megalite.torch_internals import profiler_looks_on


def named(name: str) -> AbstractContextManager[object]:
    """Name the block in a profile that is being taken; otherwise do nothing."""
    return torch.profiler.record_function(name) if profiler_looks_on() else nullcontext()

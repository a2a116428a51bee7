"""Names of what runs, for a profile of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from megalite.torch_internals import is_profiling


def profile_range(name: str) -> AbstractContextManager[object]:
    """Name the block in a profile that is being taken; otherwise do nothing."""
    return torch.profiler.record_function(name) if is_profiling() else nullcontext()

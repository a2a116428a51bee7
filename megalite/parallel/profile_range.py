"""Names for sections of code in a profile."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from megalite.torch_internals import is_profiling


def profile_range(name: str) -> AbstractContextManager[object]:
    """Return a context that names its block in the profile being recorded. Without a profiler it does nothing."""
    return torch.profiler.record_function(name) if is_profiling() else nullcontext()

"""Names of what runs, for a profile of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def profiled() -> bool:
    """Whether a profiler of torch's, or nsys with its ranges, looks on."""
    return bool(torch._C._autograd._profiler_enabled())


def named(name: str) -> AbstractContextManager[object]:
    """In a profile that is being taken the block has this name; otherwise nothing is done."""
    return torch.profiler.record_function(name) if profiled() else nullcontext()

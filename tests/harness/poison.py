"""Memory that is NaN until it is written, to find reads of uninitialized memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill tensors of `empty` with NaN, or the largest whole number, by torch's deterministic mode."""
    before = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True  # type: ignore[assignment]
    assert torch.empty(2).isnan().all()
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(False)

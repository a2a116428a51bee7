"""Terms of the loss before the first step: what may be declared, and how it is counted."""

from __future__ import annotations

from typing import Any

import torch

from megalite.parallel.stage import LossTerm
from megalite.training.loss_terms import counted


def test_counts_are_on_the_device_wherever_they_were_made() -> None:
    """A count may be a number of the micro-batch's on the CPU, or a sum over its mask on the device."""
    device = torch.device("meta")
    terms = [
        LossTerm("rows", lambda rows: torch.tensor(rows)),
        LossTerm("mask", lambda rows: torch.ones((), device=device)),
    ]
    micro_batches: Any = [3, 4]
    counts = counted(terms, micro_batches, device)
    assert {name: (count.device, count.dtype) for name, count in counts.items()} == dict.fromkeys(
        ("rows", "mask"), (device, torch.float64)
    )

"""Sums over runs of a whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.optim.layout import ParameterGroup
from megalite.optim.shard import Segment
from megalite.optim.tensor_groups import Run


def sums(values: Tensor, first: int, last: int, counted: slice) -> list[float]:
    own = values[first:last]
    segment = Segment(ParameterGroup(True, False, True), (), first, last, own, own, own, {})
    return torch.cat(list(Run(segment, counted).sums_of_squares(own))).tolist()


def test_blocks_of_a_run_are_those_of_its_bucket() -> None:
    """A cut where a shard may end, a multiple of 64, changes no block; elements that are not counted are left out."""
    values = torch.rand(400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = sums(values, 10, 300, slice(0, 290))
    assert len(whole) == 5
    assert sums(values, 10, 128, slice(0, 118)) + sums(values, 128, 300, slice(0, 172)) == whole
    assert sums(values, 10, 300, slice(0, 118)) + sums(values, 10, 300, slice(118, 290)) == whole

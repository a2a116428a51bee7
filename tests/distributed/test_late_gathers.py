"""Gathers of parameters that arrive only when they are waited for: code that reads without waiting reads old
weights."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from tests.distributed.layout_cell import Cell, make_cell
from tests.distributed.layout_expected import result_of, run
from tests.distributed.layout_run import RankResult, run_cells
from tests.harness.close import assert_bits_equal
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except


def gather_when_waited_for(tensor: Tensor, group: Group, out: Tensor | None = None) -> collectives.Pending:
    now = collectives_all_gather_async
    kept = tensor.clone()  # later changes by a reader are not sent
    return collectives.Pending(None, lambda: now(kept, group, out).wait())


collectives_all_gather_async = collectives.all_gather_async


def run_with_late_gathers(cells: Sequence[Cell]) -> list[RankResult]:
    with mock.patch.object(collectives, "all_gather_async", gather_when_waited_for):
        return run_cells(cells)


@pytest.mark.parametrize("zero", wide_except([1, 2, 3], [1]))
def test_every_reader_waits(zero: int, rank_pools: RankPools) -> None:
    rest = {"tp": 1, "dp": 2, "zero": zero, "overlap": "reduce and gather", "family": "llama", "recompute": "block"}
    cell = make_cell(rest, steps=3, optimizer="adam", clip_grad=0.5)
    (expected,) = run(rank_pools, [cell])
    late = result_of(cell, [results[0] for results in rank_pools(2).run(run_with_late_gathers, [cell])])
    assert late.losses == expected.losses
    for name, value in expected.final.items():
        assert_bits_equal(late.final[name], value, name)

"""Gathers of parameters that arrive only when they are waited for: code that reads without waiting reads old
weights."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from tests.distributed import layout_run
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


def run_with_late_gathers(cells: Sequence[Cell], bucket_size: int = layout_run.BUCKET_SIZE) -> list[RankResult]:
    with (
        mock.patch.object(collectives, "all_gather_async", gather_when_waited_for),
        mock.patch.object(layout_run, "BUCKET_SIZE", bucket_size),
    ):
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


def test_latents_that_travel_wait_for_the_matrix_that_each_rank_applies_to_them(rank_pools: RankPools) -> None:
    """No other reader waits for it if each parameter has a bucket of its own."""
    rest = {"tp": 1, "dp": 1, "cp": 2, "zero": 1, "overlap": "reduce and gather", "family": "llama"}
    cell = make_cell(rest | {"latents": "narrow values"}, steps=3, optimizer="adam")
    (expected,) = run(rank_pools, [cell])
    ranks = rank_pools(2).run(run_with_late_gathers, [cell], bucket_size=100)
    late = result_of(cell, [results[0] for results in ranks])
    assert late.losses == pytest.approx(expected.losses, rel=1e-12)
    for name, value in expected.final.items():
        assert (late.final[name] - value).abs().max() <= 1e-10, name

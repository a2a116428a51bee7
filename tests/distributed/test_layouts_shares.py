"""Unequal shares of the data-parallel ranks in the micro-batches of a step: the same training (docs/invariants.md)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.layout_cell import Cell, make_cell
from tests.distributed.layout_cell import valid as can_run
from tests.distributed.layout_expected import assert_as_expected, run
from tests.distributed.test_layouts import PLAINEST
from tests.harness.covering_array import Row, covering_array, uncovered
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

SHARES = {
    2: ((4, 2), (1, 5)),
    3: ((3, 2, 1), (1, 4, 1)),
    4: ((2, 1, 2, 1), (1, 1, 2, 2)),
}
"""Shares of 6 micro-batches by the number of data-parallel ranks."""
FACTORS: dict[str, tuple[Any, ...]] = {
    "dp": (2, 3, 4),
    "steep": (False, True),
    "zero": (0, 1, 2, 3),
    "instances": (1, 2),
    "family": ("gpt2", "llama", "mixtral", "deepseek"),
    "ep": (1, 2),
    "tp": (1, 2),
    "cp": (1, 2),
    "pp": (1, 2),
    "schedule": ("1f1b", "gpipe", "zb-h1", "interleaved-2", "zb-v"),
    "overlap": ("none", "reduce", "reduce and gather"),
    "recompute": ("none", "selective", "uniform"),
    "micro_batch_size": (1, 2),
    "loss_mask": ("ones", "random"),
    "tied": (True, False),
    "dropout": (0.0, 0.2),
}
"""Factors of shares, and those of the layout that they meet."""
PLAIN = {name: value for name, value in PLAINEST.items() if name not in FACTORS}


def valid(row: Row) -> bool:
    if row["tp"] * row["cp"] * row["pp"] * row["dp"] > 8:
        return False
    experts = row["family"] in ("mixtral", "deepseek")
    if row["ep"] > 1 and (not experts or row["dp"] % row["ep"] or row["cp"] > 1):
        return False
    if row["family"] == "mixtral" and row["micro_batch_size"] > 1:  # its balancing loss is of a micro-batch
        return False
    if experts and row["tp"] > 1:  # needs sequence parallelism, which others have
        return False
    # The rules of the matrix, for as many samples as all ranks can share. They read what they need alone: a search that
    # decides all factors for them takes seconds.
    return can_run(PLAIN | row | {"micro_batch_size": 1, "family": "llama", "key_values": "mha"})


ROWS = covering_array(FACTORS, valid, cost=lambda row: row["tp"] * row["cp"] * row["pp"] * row["dp"])
IN_MAKE_TEST = [0, 13, 19]


def cell_of(row: Row) -> Cell:
    layout = {name: value for name, value in row.items() if name != "steep"}
    shares = SHARES[row["dp"]][row["steep"]]
    return make_cell(PLAIN | layout, shares=shares, samples=6 * row["micro_batch_size"], steps=2)


def test_experts_over_more_ranks_than_the_other_layers(rank_pools: RankPools) -> None:
    """ETP 2 beside TP 1: the two data-parallel ranks share each expert, so that one has empty slots."""
    layout = {"dp": 2, "etp": 2, "family": "mixtral"}
    cell = make_cell(PLAIN | layout, shares=(4, 2), samples=6, steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.wide
def test_every_pair_of_factors_meets() -> None:
    assert not uncovered(FACTORS, valid, ROWS)


@pytest.mark.wide_except("13")
@pytest.mark.parametrize("number", wide_except(range(len(ROWS)), IN_MAKE_TEST))
def test_the_training_is_that_of_equal_shares(number: int, rank_pools: RankPools) -> None:
    cell = cell_of(ROWS[number])
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)

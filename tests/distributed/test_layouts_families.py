"""Options of the network that gpt2 and llama lack, on layouts that split it: one step against the oracle."""

from __future__ import annotations

import pytest

from tests.distributed.layout_cell import FAMILIES, make_cell
from tests.distributed.layout_expected import assert_as_expected, run
from tests.distributed.test_layouts import DROPOUT
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools

LAYOUTS: dict[str, Row] = {
    "alone": {"dp": 1, "documents": True, "recompute": "uniform", "micro_batch_size": 2},
    "tp2": {"dp": 1, "tp": 2, "key_values": "uneven6", "recompute": "selective"},
    "tp2-sp": {
        "dp": 1,
        "tp": 2,
        "sequence_parallel": True,
        "qk_layernorm": True,
        "key_values": "mqa",
        "documents": True,
    },
    "pp2": {"dp": 1, "pp": 2, "schedule": "zb-v", "vocabulary": "odd", "tied": False, "recompute": "block"},
    "zero3": {"dp": 2, "zero": 3, "overlap": "reduce and gather", "key_values": "gqa"},
    "tp2-sp-pp2": {"dp": 1, "tp": 2, "sequence_parallel": True, "pp": 2, "vocabulary": "odd", "loss_mask": "random"},
}


@pytest.mark.wide_except("gemma3-tp2-sp-pp2", "gemma-zero3", "neox-pp2")
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=[pytest.mark.wide] * ((row - column) % 3 > 0))  # in turn
        for row, family in enumerate(FAMILIES[2:])
        for column, layout in enumerate(LAYOUTS)
    ],
)
def test_one_step_is_the_oracles(family: str, layout: str, rank_pools: RankPools) -> None:
    turn = FAMILIES.index(family) + list(LAYOUTS).index(layout)
    cell = make_cell(LAYOUTS[layout] | {"family": family}, dropout=DROPOUT[turn % 2])
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)

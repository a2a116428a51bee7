"""Options of attention on layouts that split it: a gated output, layers without positions; against the oracle."""

from __future__ import annotations

import pytest

from tests.distributed.layout_cell import LAYERS, make_cell
from tests.distributed.layout_expected import assert_as_expected, run
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, Row] = {
    "alone": {"dp": 1, "cp": 1, "documents": True, "recompute": "uniform", "micro_batch_size": 2},
    "tp2": {"dp": 1, "cp": 1, "tp": 2, "key_values": "uneven6", "recompute": "selective", "optimizer": "muon"},
    "tp2-sp": {"dp": 1, "cp": 1, **SP, "qk_layernorm": True, "key_values": "mqa", "documents": True},
    "cp2": {"dp": 1, "cp": 2, "documents": True, "key_values": "gqa"},
    "cp2-a2a": {"dp": 1, "cp": 2, "way": "a2a", "family": "gemma3", "recompute": "selective"},
    "cp2-tp2-gather": {"dp": 1, "cp": 2, "way": "all_gather", **SP, "documents": True, "optimizer": "adam"},
    "pp2": {"dp": 1, "cp": 1, "pp": 2, "schedule": "zb-v", "vocabulary": "odd", "tied": False, "recompute": "block"},
    "zero3": {"dp": 2, "cp": 1, "zero": 3, "overlap": "reduce and gather", "key_values": "gqa", "optimizer": "muon"},
    "tp2-sp-pp2": {"dp": 1, "cp": 1, **SP, "pp": 2, "vocabulary": "odd", "loss_mask": "random"},
}


@pytest.mark.parametrize("layout", wide_except(LAYOUTS, ["tp2-sp", "cp2", "zero3"]))
def test_steps_with_a_gated_output_are_the_oracles(layout: str, rank_pools: RankPools) -> None:
    row = {"family": "gpt2" if "pp" in LAYOUTS[layout] else "llama"} | LAYOUTS[layout]
    cell = make_cell(row, output_gate=True, dropout=0.1 * (list(LAYOUTS).index(layout) % 2), steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.parametrize("layout", wide_except(LAYOUTS, ["cp2-a2a", "tp2-sp-pp2"]))
def test_steps_without_positions_in_some_layers_are_the_oracles(layout: str, rank_pools: RankPools) -> None:
    """One of them has a window, in gemma3, and some stages have none of them."""
    row = {"family": "llama"} | LAYOUTS[layout]
    cell = make_cell(row, no_rope_freq=str([int(layer in (1, 2)) for layer in range(LAYERS)]))
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


def test_letters_without_positions_are_the_oracles(rank_pools: RankPools) -> None:
    cell = make_cell({"family": "llama", "pattern": "*-**-", "dp": 1}, no_rope_freq="[0,0,1,0,0]")
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)

"""Options of attention on layouts that split it: gates, layers without positions, sinks; against the oracle."""

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


@pytest.mark.parametrize("layout", wide_except(LAYOUTS, ["cp2"]))
def test_steps_with_a_gated_output_are_the_oracles(layout: str, rank_pools: RankPools) -> None:
    row = {"family": "gpt2" if "pp" in LAYOUTS[layout] else "llama"} | LAYOUTS[layout]
    cell = make_cell(row, output_gate=True, dropout=0.1 * (list(LAYOUTS).index(layout) % 2), steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.parametrize("layout", wide_except(LAYOUTS, ["cp2-a2a"]))
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


@pytest.mark.parametrize("layout", wide_except(LAYOUTS, ["cp2-a2a"]))
def test_steps_with_sinks_are_the_oracles(layout: str, rank_pools: RankPools) -> None:
    row = {"family": "llama"} | LAYOUTS[layout]
    cell = make_cell(row, softmax_type="learnable", dropout=0.1 * (list(LAYOUTS).index(layout) % 2), steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


SINKS: dict[str, Row] = {
    "alone, capped, dropout": {"cp": 1, "family": "gemma", "dropout": 0.1, "recompute": "selective"},
    "cp2, capped": {"cp": 2, "family": "gemma", "documents": True},
    "cp2, dropout": {"cp": 2, "tp": 2, "key_values": "uneven6", "attention_dropout": 0.2, "documents": True},
    "cp3, off by one": {"cp": 3, "softmax_type": "off-by-one", "chunks": 2},
    "cp4": {"cp": 4, "way": "a2a+p2p", "dropout": 0.1, "documents": True, "family": "gemma3"},
    "off by one": {"cp": 1, "tp": 2, "softmax_type": "off-by-one", "dropout": 0.1, "documents": True},
}


@pytest.mark.parametrize("name", wide_except(SINKS, ["cp2, dropout", "alone, capped, dropout"]))
def test_sinks_with_caps_and_dropout_are_the_oracles(name: str, rank_pools: RankPools) -> None:
    cell = make_cell({"dp": 1, "family": "llama", "softmax_type": "learnable"} | SINKS[name])
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


OVER_HEADS: dict[str, Row] = {
    "alone": {"cp": 1, "dp": 1, "recompute": "uniform", "key_values": "gqa"},
    "tp2": {"cp": 1, "dp": 1, "tp": 2, "key_values": "uneven6", "optimizer": "adam", "documents": True},
    "tp4-sp": {"cp": 1, "dp": 1, "tp": 4, "sequence_parallel": True, "key_values": "few", "recompute": "block"},
    "tp2-sp-cp2": {"cp": 2, "dp": 1, **SP, "key_values": "mqa", "family": "gemma3", "recompute": "selective"},
    "tp2-pp2-zero3": {"cp": 1, "dp": 2, "tp": 2, "pp": 2, "zero": 3, "schedule": "zb-h1", "tied": False},
}


@pytest.mark.parametrize("layout", wide_except(OVER_HEADS, ["tp2-sp-cp2"]))
def test_steps_with_norms_over_all_heads_are_the_oracles(layout: str, rank_pools: RankPools) -> None:
    """Their sums go over the tensor-parallel ranks, of which several have a group of keys."""
    row = {"family": "llama", "qk_layernorm": True} | OVER_HEADS[layout]
    cell = make_cell(row, norm_over_heads=True, dropout=0.1 * (list(OVER_HEADS).index(layout) % 2), steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


GPT_OSS: dict[str, Row] = {
    "alone": {"cp": 1, "dp": 1, "documents": True, "recompute": "uniform", "micro_batch_size": 2},
    "ep2-tp2-sp": {"cp": 1, "dp": 1, "ep": 2, **SP, "dropout": 0.1, "optimizer": "muon"},
    "cp2-ep2": {"cp": 2, "dp": 1, "ep": 2, "documents": True, "recompute": "experts", "optimizer": "adam"},
    "pp2-etp2-zero3": {"cp": 1, "dp": 2, "pp": 2, "etp": 2, "zero": 3, "schedule": "zb-h1", "tied": False},
}


@pytest.mark.parametrize("layout", wide_except(GPT_OSS, ["ep2-tp2-sp"]))
def test_steps_of_gpt_oss_are_the_oracles(layout: str, rank_pools: RankPools) -> None:
    """Sinks in windows, biases of experts and routers, clamped gates."""
    cell = make_cell({"family": "gpt-oss", "key_values": "gqa"} | GPT_OSS[layout], steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)

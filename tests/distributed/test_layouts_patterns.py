"""Patterns of layers on layouts that split the network in every way: steps against the oracle, and the bits of a GPT.

A GPT and the pattern of its halves are one network: the same bits on every layout, and one checkpoint for both.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.layout_cell import LAYERS, make_cell
from tests.distributed.layout_expected import assert_as_expected, assert_same_bits, run
from tests.distributed.test_checkpoint_layouts import Pair, check
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

AS_GPT = "*-" * LAYERS
SP = {"tp": 2, "sequence_parallel": True}
PATTERNS: dict[str, Row] = {
    "one attention": {"pattern": "*", "dp": 1, "recompute": "uniform"},
    "no attention": {"pattern": "-E-", "dp": 2, "zero": 1, "family": "mixtral"},
    "halves in any order": {"pattern": "-**--*", "dp": 1, "mlp_parts": 3, "recompute": "selective", "documents": True},
    "tp2": {"pattern": "**--*-", "dp": 1, "tp": 2, "key_values": "uneven6", "recompute": "block"},
    "tp2-sp": {"pattern": "-**-*", "dp": 1, **SP, "qk_layernorm": True, "key_values": "mqa"},
    "cp2": {"pattern": "**-*-", "dp": 1, "cp": 2, "documents": True, "family": "llama"},
    "cp2-a2a-windows": {"pattern": "**-*", "dp": 1, "cp": 2, "way": "a2a", "family": "gemma3"},
    "pp2": {"pattern": "*-*|-*-", "dp": 1, "pp": 2, "vocabulary": "odd"},
    "pp2 in a v": {"pattern": "*||-*|--", "dp": 1, "pp": 2, "schedule": "zb-v", "tied": False},
    "pp2 interleaved": {"pattern": "*|-**|-|--", "dp": 1, "pp": 2, "schedule": "interleaved-2", "recompute": "uniform"},
    "pp2, experts": {"pattern": "**--|E*-", "dp": 1, "pp": 2, "family": "mixtral", "padding": True},
    "tp2-sp-pp2, experts": {"pattern": "*E*|-*E", "dp": 1, **SP, "pp": 2, "family": "deepseek"},
    "zero3, experts": {"pattern": "**--E*-", "dp": 2, "ep": 2, "zero": 3, "family": "mixtral", "overlap": "reduce"},
    "sandwich norms": {"pattern": "*-|-*", "dp": 2, "pp": 2, "zero": 2, "family": "gemma"},
    "norms behind": {"pattern": "*-G-|-*", "dp": 1, **SP, "pp": 2, "output_norm_freq": "[1,1,0,0,1,1]", "mlp_parts": 3},
    "norms behind, experts": {"pattern": "E*-", "dp": 2, "zero": 3, "family": "mixtral", "output_norm_freq": "[1,1,1]"},
    "norms behind, cp2": {"pattern": None, "dp": 1, "cp": 2, "output_norm_freq": "[0,1,1,1]", "recompute": "selective"},
}
LAYOUTS: dict[str, tuple[Row, str]] = {
    "alone": ({"dp": 1, "documents": True, "micro_batch_size": 2}, AS_GPT),
    "tp2-sp": ({"dp": 1, **SP, "key_values": "mqa"}, AS_GPT),
    "cp2": ({"dp": 1, "cp": 2, "chunks": 2, "documents": True}, AS_GPT),
    "zero3": ({"dp": 2, "zero": 3, "overlap": "reduce and gather"}, AS_GPT),
    "pp2": ({"dp": 1, "pp": 2, "schedule": "zb-h1"}, "*-*-|*-*-"),
    "experts": ({"dp": 2, "ep": 2, "zero": 1, "family": "deepseek"}, "*-*E*E*E"),
}
"""Layouts of a GPT, and the pattern that is the same network on the same stages."""
LOADS: dict[str, tuple[Row, Row]] = {
    "tp2": ({"dp": 2, "zero": 1}, {"dp": 1, "tp": 2, "pattern": AS_GPT}),
    "pp2 and back": ({"dp": 1, "pp": 2, "pattern": "*|-*-*-*-"}, {"dp": 2, "zero": 3}),
    "pp2-tp2": ({"dp": 2, "zero": 2}, {"dp": 1, "tp": 2, "pp": 2, "pattern": "*-*-*|-*-"}),
    "cp2 and back": ({"dp": 1, "cp": 2, "pattern": AS_GPT}, {"dp": 1, "tp": 2}),
    "experts": (
        {"dp": 2, "ep": 2, "family": "mixtral"},
        {"dp": 1, "pp": 2, "family": "mixtral", "pattern": "*E*|E*E*E"},
    ),
}


@pytest.mark.parametrize("name", wide_except(PATTERNS, ["cp2", "pp2, experts", "zero3, experts"]))
def test_steps_are_the_oracles(name: str, rank_pools: RankPools) -> None:
    cell = make_cell({"cp": 1} | PATTERNS[name], dropout=0.1 * (list(PATTERNS).index(name) % 2), steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.parametrize("layout", wide_except(LAYOUTS, ["tp2-sp"]))
def test_a_gpt_and_the_pattern_of_its_halves_have_the_same_bits(layout: str, rank_pools: RankPools) -> None:
    row, pattern = LAYOUTS[layout]
    cell = make_cell({"cp": 1} | row, dropout=0.1, steps=2, optimizer="adam")
    gpt, halves = run(rank_pools, [cell, replace(cell, pattern=pattern)])
    assert_same_bits(halves, gpt, layout)


@pytest.mark.parametrize("name", wide_except(LOADS, ["pp2 and back"]))
def test_a_checkpoint_goes_on_as_the_other(name: str, rank_pools: RankPools, tmp_path: Path) -> None:
    saving, loading = (make_cell({"cp": 1} | row, optimizer="adam", samples=4) for row in LOADS[name])
    check(rank_pools, [Pair(saving, loading)], tmp_path)

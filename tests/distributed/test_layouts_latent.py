"""Latent attention on layouts that split the network in every way: steps against the oracle, and bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.layout_cell import make_cell
from tests.distributed.layout_expected import assert_as_expected, assert_same_bits, run
from tests.distributed.test_checkpoint_layouts import Pair, check
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

SP = {"tp": 2, "sequence_parallel": True}
NARROW: Row = {"latents": "narrow values", "qk_layernorm": True, "family": "llama"}
WIDE: Row = {"latents": "wide values", "qk_layernorm": True, "family": "llama"}
EQUAL: Row = {"latents": "equal", "family": "llama"}
LAYOUTS: dict[str, Row] = {
    "alone": {**NARROW, "dp": 1, "documents": True, "micro_batch_size": 2},
    "alone, wide values": {**WIDE, "dp": 1, "documents": True, "output_gate": True},
    "without norms, selective": {**EQUAL, "dp": 1, "recompute": "selective", "loss_mask": "random"},
    "a table, biases": {**NARROW, "dp": 1, "family": "gpt2", "output_gate": True, "documents": True},
    "without positions": {**NARROW, "dp": 1, "without_positions": True, "documents": True},
    "yarn": {**NARROW, "dp": 1, "yarn": True, "recompute": "uniform"},
    "yarn, tp2-sp": {**WIDE, "dp": 1, **SP, "yarn": True, "documents": True},
    "norms behind": {**NARROW, "dp": 1, "tp": 2, "output_norm_freq": "[1,0,1,0]", "pattern": None},
    "tp2": {**NARROW, "dp": 1, "tp": 2, "key_values": "gqa"},
    "tp2, wide values": {**WIDE, "dp": 1, "tp": 2, "output_gate": True, "documents": True},
    "tp2-sp": {**NARROW, "dp": 1, **SP, "documents": True, "recompute": "block"},
    "tp2-sp, a gate": {**NARROW, "dp": 1, **SP, "output_gate": True, "loss_mask": "random"},
    "tp4, a head a rank": {**WIDE, "dp": 1, "tp": 4, "recompute": "selective"},
    "tp4-sp, a head a rank": {**NARROW, "dp": 1, **SP, "tp": 4},
    "cp2": {**NARROW, "dp": 1, "cp": 2, "documents": True},
    "cp2, gathered": {**WIDE, "dp": 1, "cp": 2, "way": "all_gather", "documents": True},
    "cp2, heads exchanged": {**NARROW, "dp": 1, "cp": 2, "way": "a2a", "documents": True, "yarn": True},
    "cp2, dealt": {**EQUAL, "dp": 1, "cp": 2, "chunks": 4, "documents": True},
    "cp3": {**NARROW, "dp": 1, "cp": 3, "recompute": "selective"},
    "cp4, in two ways": {**WIDE, "dp": 1, "cp": 4, "way": "a2a+p2p", "documents": True},
    "cp2-tp2-sp": {**NARROW, "dp": 1, "cp": 2, **SP, "documents": True},
    "pp2": {**NARROW, "pattern": "+-|+-", "dp": 1, "pp": 2, "documents": True},
    "pp2 in a v": {**WIDE, "pattern": "+|-+|-|+", "dp": 1, "pp": 2, "schedule": "zb-v", "tied": False},
    "pp2 in a v, tp2-sp": {**NARROW, "pattern": "+|-+|-|+", "dp": 1, "pp": 2, **SP, "schedule": "zb-v", "tied": False},
    "pp2-cp2 in a v": {**NARROW, "pattern": "+|-+|-|+", "dp": 1, "pp": 2, "cp": 2, "schedule": "zb-v", "tied": False},
    "pp2 interleaved": {**NARROW, "pattern": "+|-+|-|+", "dp": 1, "pp": 2, "schedule": "interleaved-2"},
    "zero1": {**NARROW, "dp": 2, "zero": 1, **SP, "overlap": "reduce and gather"},
    "zero2": {**WIDE, "dp": 2, "zero": 2, "documents": True},
    "zero3": {**NARROW, "dp": 2, "zero": 3, "overlap": "reduce and gather"},
    "zero3-tp2-cp2": {**NARROW, "dp": 2, "zero": 3, "tp": 2, "cp": 2, "documents": True},
    "with recurrent layers": {**NARROW, "pattern": "K+-G+", "dp": 1, **SP, "documents": True},
    "experts": {**NARROW, "dp": 2, "ep": 2, "zero": 1, "family": "deepseek", "documents": True},
    "experts, pp2, tp2-sp": {**NARROW, "pattern": "+-|+E", "dp": 1, "pp": 2, **SP, "ep": 2, "family": "deepseek"},
    "experts, cp2": {**WIDE, "pattern": "+E", "dp": 1, "cp": 2, "ep": 2, "family": "kimi"},
}
OFTEN = ["alone, wide values", "yarn, tp2-sp", "cp2", "pp2 in a v"]
LOADS: dict[str, tuple[Row, Row]] = {
    "tp2 to pp2": ({**NARROW, "dp": 1, "tp": 2, "pattern": "+-+-"}, {**NARROW, "dp": 1, "pp": 2, "pattern": "+-|+-"}),
    "zero3 to cp2": ({**WIDE, "dp": 2, "zero": 3}, {**WIDE, "dp": 1, "cp": 2}),
    "a GPT to its pattern": ({**NARROW, "dp": 1, **SP}, {**NARROW, "dp": 2, "zero": 1, "pattern": "+-" * 4}),
}


@pytest.mark.parametrize("name", wide_except(LAYOUTS, OFTEN))
def test_steps_are_the_oracles(name: str, rank_pools: RankPools) -> None:
    cell = make_cell({"cp": 1} | LAYOUTS[name], dropout=0.1 * (list(LAYOUTS).index(name) % 2), steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.wide
@pytest.mark.parametrize("latents", ["narrow values", "wide values"])
def test_matrices_are_those_of_muon(latents: str, rank_pools: RankPools) -> None:
    row = {**NARROW, "latents": latents, "cp": 1, "dp": 2, "zero": 1, **SP, "output_gate": True}
    cell = make_cell(row, optimizer="muon", steps=2)
    cells = [cell, replace(cell, per_head=True)]
    for each, result in zip(cells, run(rank_pools, cells), strict=True):
        assert_as_expected(each, result)


@pytest.mark.parametrize("name", wide_except(LOADS, ["a GPT to its pattern"]))
def test_a_checkpoint_goes_on_under_another_layout(name: str, rank_pools: RankPools, tmp_path: Path) -> None:
    saving, loading = (make_cell({"cp": 1} | row, optimizer="adam", samples=4) for row in LOADS[name])
    check(rank_pools, [Pair(saving, loading)], tmp_path)


@pytest.mark.wide_except("selective-2")
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("recompute", ["uniform", "block", "selective"])
def test_recomputed_layers_have_the_same_bits(recompute: str, cp: int, rank_pools: RankPools) -> None:
    cell = make_cell({**NARROW, "cp": cp, "dp": 1, "documents": True}, dropout=0.1, steps=2, optimizer="adam")
    plain, again = run(rank_pools, [cell, replace(cell, recompute=recompute)])
    assert_same_bits(again, plain, recompute)


@pytest.mark.wide
@pytest.mark.parametrize("layout", ["tp2-sp", "cp2"])
def test_a_gpt_and_the_pattern_of_its_halves_have_the_same_bits(layout: str, rank_pools: RankPools) -> None:
    cell = make_cell({"cp": 1} | LAYOUTS[layout], dropout=0.1, steps=2, optimizer="adam")
    gpt, halves = run(rank_pools, [cell, replace(cell, pattern="+-" * 4)])
    assert_same_bits(halves, gpt, layout)

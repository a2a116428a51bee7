"""Sparse attention on layouts that split the network in every way: steps against the oracle, and bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.layout_cell import make_cell
from tests.distributed.layout_expected import assert_as_expected, assert_same_bits, run
from tests.distributed.test_checkpoint_layouts import Pair, check
from tests.harness.close import assert_bits_equal, assert_gradient_close
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

SP = {"tp": 2, "sequence_parallel": True}
FEW: Row = {"latents": "narrow values", "qk_layernorm": True, "family": "llama", "indexing": "few"}
CHOSEN: Row = {"latents": "wide values", "qk_layernorm": True, "family": "llama", "indexing": "sparse loss"}
PLAIN: Row = {"latents": "equal", "family": "llama", "indexing": "without relu"}
LAYOUTS: dict[str, Row] = {
    "alone": {**FEW, "dp": 1, "documents": True, "micro_batch_size": 2},
    "alone, loss over chosen keys": {**CHOSEN, "dp": 1, "documents": True, "output_gate": True},
    "without relu and norms, selective": {**PLAIN, "dp": 1, "recompute": "selective", "loss_mask": "random"},
    "padding": {**FEW, "dp": 1, "padding": True},
    "more keys than are seen": {**FEW, "indexing": "more than is seen", "dp": 1, "documents": True},
    "without a loss": {**FEW, "indexing": "without loss", "dp": 2, "zero": 1, "tp": 2},
    "a table, biases": {**FEW, "dp": 1, "family": "gpt2", "documents": True},
    "without positions": {**FEW, "dp": 1, "without_positions": True},
    "yarn, around one": {**CHOSEN, "dp": 1, **SP, "yarn": True, "documents": True},
    "tp2": {**FEW, "latents": "wide values", "dp": 1, "tp": 2, "key_values": "gqa", "documents": True},
    "tp2-sp": {**FEW, "dp": 1, **SP, "documents": True, "recompute": "block"},
    "tp4-sp, a head a rank": {**CHOSEN, "dp": 1, **SP, "tp": 4, "padding": True},
    "cp2": {**FEW, "dp": 1, "cp": 2, "documents": True},
    "cp2, chosen keys, dealt": {**CHOSEN, "dp": 1, "cp": 2, "chunks": 4, "documents": True, "recompute": "uniform"},
    "cp3": {**CHOSEN, "dp": 1, "cp": 3, "recompute": "selective"},
    "cp2-tp2": {**FEW, "dp": 1, "cp": 2, "tp": 2, "documents": True},
    "cp2-tp2-sp": {**CHOSEN, "dp": 1, "cp": 2, **SP, "documents": True, "recompute": "block"},
    "cp4, more keys than are seen": {**FEW, "indexing": "more than is seen", "dp": 1, "cp": 4},
    "pp2": {**FEW, "pattern": "D-|D-", "dp": 1, "pp": 2, "documents": True},
    "pp2 in a v, tp2-sp": {**CHOSEN, "pattern": "D|-D|-|+", "dp": 1, "pp": 2, **SP, "schedule": "zb-v", "tied": False},
    "pp2-cp2 in a v": {**FEW, "pattern": "+|-D|-|D", "dp": 1, "pp": 2, "cp": 2, "schedule": "zb-v", "tied": False},
    "pp2 interleaved": {**FEW, "pattern": "D|-D|-|D", "dp": 1, "pp": 2, "schedule": "interleaved-2"},
    "zero1": {**FEW, "dp": 2, "zero": 1, **SP, "overlap": "reduce and gather"},
    "zero3": {**CHOSEN, "dp": 2, "zero": 3, "overlap": "reduce and gather"},
    "zero3-tp2-cp2": {**FEW, "dp": 2, "zero": 3, "tp": 2, "cp": 2, "documents": True},
    "with other layers": {**FEW, "pattern": "K+-GD", "dp": 1, **SP, "documents": True},
    "experts": {**FEW, "dp": 2, "ep": 2, "zero": 1, "family": "deepseek", "documents": True},
    "experts, pp2, tp2-sp": {**FEW, "pattern": "D-|DE", "dp": 1, "pp": 2, **SP, "ep": 2, "family": "deepseek"},
    "shared choices": {**FEW, "indexing": "every second", "dp": 1, "documents": True, "recompute": "block"},
    "shared choices, cp2-tp2-sp": {**CHOSEN, "indexing": "from the second on", "dp": 1, "cp": 2, **SP},
    "shared choices, pp2": {**FEW, "indexing": "every second", "pattern": "DDD|-D-D", "dp": 1, "pp": 2},
    "a depth": {**FEW, "dp": 1, **SP, "depths": 2, "documents": True, "recompute": "uniform"},
    "depths, letters, cp2": {**CHOSEN, "dp": 1, "cp": 2, "pattern": "+-D", "depth_letters": "D-", "depths": 1},
    "a repeated depth, pp2": {**FEW, "dp": 1, "pp": 2, "depths": 2, "repeated": True},
}
OFTEN = [
    "alone, loss over chosen keys",
    "pp2-cp2 in a v",
    "shared choices, cp2-tp2-sp",
]
STAGES: dict[str, Row] = {
    "warmup": {**FEW, "indexing": "warmup", "dp": 1, "documents": True},
    "warmup, cp2-tp2-sp": {**FEW, "indexing": "warmup", "dp": 1, "cp": 2, **SP, "recompute": "uniform"},
    "warmup, pp2, zero1": {**FEW, "indexing": "warmup", "pattern": "D-|+-", "dp": 2, "zero": 1, "pp": 2},
    "warmup, experts": {**FEW, "indexing": "warmup", "dp": 2, "ep": 2, "zero": 3, "family": "mixtral"},
    "warmup, zb-v": {**FEW, "indexing": "warmup", "pattern": "D|-D|-|+", "dp": 1, "pp": 2, "schedule": "zb-v"},
    "indexer": {**CHOSEN, "indexing": "indexer", "dp": 1, **SP, "documents": True},
    "indexer, zero3": {**CHOSEN, "indexing": "indexer", "dp": 2, "zero": 3, "depths": 1},
}


@pytest.mark.parametrize("name", wide_except(LAYOUTS, OFTEN))
def test_steps_are_the_oracles(name: str, rank_pools: RankPools) -> None:
    cell = make_cell({"cp": 1} | LAYOUTS[name], dropout=0.1 * (list(LAYOUTS).index(name) % 2), steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.parametrize("name", wide_except(STAGES, ["warmup, pp2, zero1"]))
def test_stages_train_the_indexers_alone(name: str, rank_pools: RankPools) -> None:
    cell = make_cell({"cp": 1} | STAGES[name], steps=2, optimizer="adam")
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.wide
@pytest.mark.parametrize("indexing", ["few", "sparse loss"])
def test_matrices_are_those_of_muon(indexing: str, rank_pools: RankPools) -> None:
    cell = make_cell({**FEW, "indexing": indexing, "cp": 1, "dp": 2, "zero": 1, **SP}, optimizer="muon", steps=2)
    cells = [cell, replace(cell, per_head=True)]
    for each, result in zip(cells, run(rank_pools, cells), strict=True):
        assert_as_expected(each, result)


LOADS: dict[str, tuple[Row, Row]] = {
    "tp2-sp to cp2": ({**FEW, "dp": 1, **SP}, {**FEW, "dp": 1, "cp": 2}),
    "zero3 to pp2": (
        {**CHOSEN, "dp": 2, "zero": 3, "pattern": "D-D-"},
        {**CHOSEN, "dp": 1, "pp": 2, "pattern": "D-|D-"},
    ),
    "a GPT to its pattern": ({**FEW, "dp": 1, "tp": 2}, {**FEW, "dp": 2, "zero": 1, "pattern": "D-" * 4}),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", LOADS)
def test_a_checkpoint_goes_on_under_another_layout(name: str, rank_pools: RankPools, tmp_path: Path) -> None:
    saving, loading = (make_cell({"cp": 1} | row, optimizer="adam", samples=4) for row in LOADS[name])
    check(rank_pools, [Pair(saving, loading)], tmp_path)


@pytest.mark.wide_except("selective-2")
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("recompute", ["uniform", "block", "selective"])
def test_recomputed_layers_have_the_same_bits(recompute: str, cp: int, rank_pools: RankPools) -> None:
    row = {**FEW, "indexing": "every second", "cp": cp, "dp": 1, "documents": True}
    cell = make_cell(row, dropout=0.1, steps=2, optimizer="adam")
    plain, again = run(rank_pools, [cell, replace(cell, recompute=recompute)])
    assert_same_bits(again, plain, recompute)


@pytest.mark.wide_except("zb-h1")
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_schedules_have_the_same_bits(schedule: str, rank_pools: RankPools) -> None:
    cell = make_cell({**FEW, "pattern": "D-|D-", "cp": 1, "dp": 1, "pp": 2, "tied": False}, steps=2, optimizer="adam")
    plain, other = run(rank_pools, [cell, replace(cell, schedule=schedule)])
    assert_same_bits(other, plain, schedule)


@pytest.mark.wide
@pytest.mark.parametrize("layout", ["tp2-sp", "cp2"])
def test_a_gpt_and_the_pattern_of_its_halves_have_the_same_bits(layout: str, rank_pools: RankPools) -> None:
    cell = make_cell({"cp": 1} | LAYOUTS[layout], dropout=0.1, steps=2, optimizer="adam")
    gpt, halves = run(rank_pools, [cell, replace(cell, pattern="D-" * 4)])
    assert_same_bits(halves, gpt, layout)


@pytest.mark.parametrize("cp", wide_except([1, 2], [1]))
def test_an_indexer_that_chooses_all_changes_no_bit_of_the_rest(cp: int, rank_pools: RankPools) -> None:
    """The network is that of latent attention where more keys may be chosen than a token sees."""
    row = {**FEW, "indexing": "more than is seen", "cp": cp, "dp": 1}
    cell = make_cell(row, dropout=0.1, optimizer="adam")
    sparse, plain = run(rank_pools, [cell, replace(cell, indexing=None, way="all_gather")])
    for name, gradient in plain.gradients.items():
        if cp == 1:
            assert_bits_equal(sparse.gradients[name], gradient, name)
        assert_gradient_close(sparse.gradients[name], gradient, plain.gradient_norms[0], name)


def test_the_loss_of_indexers_reaches_nothing_but_them(rank_pools: RankPools) -> None:
    """Whatever its weight, the gradients of all other weights have the same bits."""
    cell = make_cell({**FEW, "cp": 2, "dp": 1, **SP, "documents": True})
    few, more = run(rank_pools, [cell, replace(cell, indexing="few, heavy")])
    of_indexers = [name for name in few.gradients if ".indexer." in name]
    assert len(of_indexers) == 5 * 4
    for name, gradient in few.gradients.items():
        if name in of_indexers:
            assert_gradient_close(more.gradients[name], 10 * gradient, more.gradient_norms[0], name)
        else:
            assert_bits_equal(more.gradients[name], gradient, name)

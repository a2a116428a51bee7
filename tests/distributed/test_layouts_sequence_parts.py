"""Feed-forward layers on parts of the sequence train the same model: against the oracle, and bits where they are equal.

Products over fewer rows may round otherwise, and weight gradients are sums in another order.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.distributed.layout_cell import FAMILIES, LAYOUT_FACTORS, RECOMPUTE, Cell, make_cell, valid
from tests.distributed.layout_expected import assert_as_expected, run
from tests.distributed.test_layouts import PLAINEST
from tests.harness.close import assert_bits_equal, assert_number_close
from tests.harness.covering_array import Row, covering_array, uncovered
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

FEW: list[dict[str, Any]] = [
    {"mlp_parts": 5, "family": "neox", "dropout": 0.1},
    {"mlp_parts": 2, "family": "llama", "tp": 3, "key_values": "uneven6", "sequence_parallel": True, "zero": 1},
    {"mlp_parts": 5, "family": "gemma", "tp": 2, "sequence_parallel": True, "dropout": 0.1, "recompute": "uniform"},
    {"mlp_parts": 5, "family": "deepseek", "pp": 2, "schedule": "zb-h1", "zero": 3, "recompute": "experts"},
    {"mlp_parts": 3, "family": "llama", "pp": 3, "schedule": "zb-v", "tied": False, "recompute": "selective"},
]
"""Sequences of 12 tokens, or of 4 and 6 on a rank: 5 does not divide them."""
FACTORS: dict[str, tuple[Any, ...]] = LAYOUT_FACTORS | {
    "mlp_parts": (2, 3, 5),
    "pp": (1, 2, 3),
    "schedule": ("1f1b", "interleaved-2", "zb-h1", "zb-v"),
    "family": FAMILIES,
    "dropout": (0.0, 0.1),
    "documents": (False, True),
}
PARTS = 6
"""Tests that share the rows."""
REST = {name: value for name, value in PLAINEST.items() if name not in FACTORS}


def runs(row: Row) -> bool:
    """Tell whether a row, perhaps incomplete, can be run on at most four ranks, with a token in each part."""
    if row["tp"] * row["cp"] * row["pp"] * row["dp"] > 4 or not valid(_Filled(row)):
        return False
    return row["tp"] < 3 or not row["sequence_parallel"] or row["mlp_parts"] < 5


class _Filled(dict):  # type: ignore[type-arg]
    """A row with the values of the factors that do not vary. Undecided factors are missing, as in the row."""

    def __missing__(self, name: str) -> object:
        return REST[name]


@cache
def rows() -> list[Row]:
    """Return rows with every pair of values. This takes seconds, so not when the module is imported."""
    return covering_array(FACTORS, runs, candidates=4, seed=7)


@pytest.mark.wide_except("2")
@pytest.mark.parametrize("number", wide_except(range(len(FEW)), [0, 2, 4]))
def test_one_step_is_the_oracles(number: int, rank_pools: RankPools) -> None:
    cell = Cell(**FEW[number])
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.wide
def test_all_pairs_are_covered() -> None:
    assert not uncovered(FACTORS, runs, rows())


@pytest.mark.wide
@pytest.mark.parametrize("part", range(PARTS))
def test_one_step_is_the_oracles_on_pairs_of_factors(part: int, rank_pools: RankPools) -> None:
    every = list(map(make_cell, rows()[part::PARTS]))
    for size in sorted({cell.world_size for cell in every}):
        cells = [cell for cell in every if cell.world_size == size]
        for cell, result in zip(cells, run(rank_pools, cells), strict=True):
            assert_as_expected(cell, result)


@pytest.mark.wide
@pytest.mark.parametrize("family", ["gpt2", pytest.param("gemma", marks=pytest.mark.wide)])
@pytest.mark.parametrize("parts", [5, *(pytest.param(number, marks=pytest.mark.wide) for number in (2, 3, 12))])
def test_a_step_differs_from_one_without_parts_by_rounding(family: str, parts: int, rank_pools: RankPools) -> None:
    """In float64, by 1e-12 of the gradient norm: a sum of 12 tokens in another order."""
    plain = Cell(family=family, dropout=0.1)
    without, with_parts = run(rank_pools, [plain, replace(plain, mlp_parts=parts)])
    assert_number_close(with_parts.losses[0], without.losses[0], "loss")
    for name, gradient in without.gradients.items():
        difference = (with_parts.gradients[name] - gradient).abs().max()
        assert difference <= 1e-12 * without.gradient_norms[0], name


@pytest.mark.bits
@pytest.mark.parametrize(
    "layout",
    [
        {"dropout": 0.1},
        pytest.param({"tp": 2, "sequence_parallel": True, "family": "gemma"}, marks=pytest.mark.wide),
        pytest.param({"pp": 2, "dp": 2, "zero": 3, "family": "llama"}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_recomputation_changes_no_bit(layout: dict[str, Any], rank_pools: RankPools) -> None:
    plain, *recomputed = run(rank_pools, [Cell(**layout, mlp_parts=5, recompute=way) for way in RECOMPUTE])
    for way, result in zip(list(RECOMPUTE)[1:], recomputed, strict=True):
        assert result.losses == plain.losses, way
        for name, gradient in plain.gradients.items():
            assert_bits_equal(result.gradients[name], gradient, f"{way}: gradient of {name}")


@pytest.mark.bits
@pytest.mark.wide
def test_schedules_change_no_bit(rank_pools: RankPools) -> None:
    schedules = ("1f1b", "gpipe", "zb-h1", "interleaved-2", "zb-v")
    first, *others = run(rank_pools, [Cell(pp=2, schedule=each, mlp_parts=5, tied=False) for each in schedules])
    for schedule, result in zip(schedules[1:], others, strict=True):
        assert result.losses == first.losses, schedule
        for name, gradient in first.gradients.items():
            assert_bits_equal(result.gradients[name], gradient, f"{schedule}: gradient of {name}")


@pytest.mark.wide
@pytest.mark.parametrize("layout", [{"dropout": 0.1}, {"family": "gemma", "tp": 2, "sequence_parallel": True}], ids=str)
def test_parts_are_compiled_once(layout: dict[str, Any], rank_pools: RankPools) -> None:
    """Parts have two lengths and other rows, which are no reason to compile them again."""
    cell = Cell(**layout, mlp_parts=5, compiled="aot_eager", steps=2)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        eager, compiled = run(rank_pools, [replace(cell, compiled=None), cell])
    for ours, theirs in zip(compiled.losses, eager.losses, strict=True):
        assert_number_close(ours, theirs, "loss")
    for name, gradient in eager.gradients.items():
        torch.testing.assert_close(compiled.gradients[name], gradient, rtol=1e-9, atol=1e-12)

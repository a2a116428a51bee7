"""One scale: the differentiated loss is the sum over counted tokens / their number in the global batch.

docs/invariants.md: I11, and I12 for steps that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import pytest

from tests.distributed.layout_cell import Cell, make_cell, rates
from tests.distributed.layout_expected import assert_as_expected, group_of, run
from tests.harness.close import assert_bits_equal
from tests.harness.rank_pool import RankPools

LAYOUTS = [
    {"tp": 1, "dp": 1},
    {"tp": 2, "dp": 1, "sequence_parallel": True},
    {"tp": 1, "dp": 4, "overlap": "reduce"},
    {"tp": 1, "dp": 2, "zero": 2, "overlap": "reduce"},
    {"tp": 1, "dp": 4, "zero": 3, "instances": 2, "overlap": "reduce and gather"},
    {"tp": 1, "dp": 1, "pp": 3, "schedule": "zb-h1"},
    {"tp": 2, "dp": 2, "zero": 1, "overlap": "reduce and gather"},
    {"tp": 2, "dp": 1, "pp": 2, "schedule": "zb-v", "sequence_parallel": True},
    {"tp": 1, "dp": 2, "pp": 2, "schedule": "interleaved-2", "zero": 1, "overlap": "reduce"},
    {"tp": 1, "dp": 2, "zero": 1},
    {"tp": 4, "dp": 2, "sequence_parallel": True},
    {"tp": 1, "dp": 8},
    {"tp": 2, "dp": 4, "zero": 3, "instances": 2, "overlap": "reduce and gather"},
    {"tp": 1, "dp": 1, "pp": 4},
    {"tp": 1, "dp": 2, "pp": 3, "schedule": "zb-h1", "zero": 3},
]

EXPERTS = {"experts": {"tp": 1, "dp": 2, "ep": 2, "zero": 1, "family": "deepseek"}}
"""Layouts of a network with biases and loads of experts, which a skipped step must not change."""


def name(layout: dict) -> str:
    return f"tp{layout['tp']}-dp{layout['dp']}-pp{layout.get('pp', 1)}" + "-sharded" * (layout.get("zero", 0) > 1)


def cases(few: Collection[str]) -> list[object]:
    """Return the layouts for a test; those whose names are not among the few are wide."""
    return [
        pytest.param(layout, id=name(layout), marks=[pytest.mark.wide] * (name(layout) not in few))
        for layout in LAYOUTS
    ]


@pytest.mark.parametrize("layout", cases(["tp1-dp2-pp1-sharded", "tp1-dp1-pp3"]))
def test_a_loss_mask_counts_the_same_whatever_the_split(layout: dict, rank_pools: RankPools) -> None:
    """Samples 0 and 3 of 8 are masked: some micro-batches, and with 8 ranks some ranks, have no token."""
    sizes = [size for size in (1, 2, 4, 8) if 8 % (layout["dp"] * size) == 0]
    rest = {"loss_mask": "random", "samples": 8, "dropout": 0.1}
    cells = [make_cell(layout | {"micro_batch_size": size}, **rest) for size in sizes]
    for cell, result in zip(cells, run(rank_pools, cells), strict=True):
        assert cell.alone() == Cell(**rest)  # all are compared with the same numbers
        assert_as_expected(cell, result)


@pytest.mark.parametrize("layout", cases(["tp1-dp1-pp3"]))
def test_a_batch_in_which_no_token_counts_has_zero_gradients(layout: dict, rank_pools: RankPools) -> None:
    cell = make_cell(layout, loss_mask="nothing", samples=8)
    (result,) = run(rank_pools, [cell])
    assert result.losses == [0.0]
    assert result.gradient_norms == [0.0]
    assert not any(gradient.any() for gradient in result.gradients.values())
    for name, value in result.initial.items():
        now, group = rates(cell, 0), group_of(name)
        rate = now.token_table_learning_rate if group == "token_tables" else now.learning_rate
        decayed = 0.0 if group == "vectors" else rate * now.weight_decay
        assert (result.final[name] - value * (1.0 - decayed)).abs().max() < 1e-12


@pytest.mark.bits
@pytest.mark.parametrize(
    "layout",
    [
        *cases(["tp2-dp1-pp1"]),
        *(pytest.param(layout, id=name, marks=pytest.mark.wide) for name, layout in EXPERTS.items()),
        pytest.param({"tp": 1, "dp": 1, "cp": 4, "way": "all_gather", "zero": 2}, id="cp4", marks=pytest.mark.wide),
    ],
)
def test_an_infinity_on_one_rank_makes_all_skip(layout: dict, rank_pools: RankPools) -> None:
    """The first step is skipped; the second has the same result as if it were the first."""
    world_size = layout["tp"] * layout["dp"] * layout.get("pp", 1) * layout.get("cp", 1)
    size = 2 if layout["dp"] <= 2 else 1  # several micro-batches
    clean = make_cell(layout, optimizer="adam", samples=8, micro_batch_size=size, first_step=1, dropout=0.1)
    ranks = sorted({0, world_size // 2, world_size - 1})
    infected = [replace(clean, first_step=0, steps=2, infinity_on=rank) for rank in ranks]
    expected, *results = run(rank_pools, [clean, *infected])
    for rank, result in zip(ranks, results, strict=True):
        assert result.skipped == [True, False]
        assert not math.isfinite(result.gradient_norms[0])
        assert result.losses[1] == expected.losses[0]
        for name, value in expected.final.items():
            assert_bits_equal(result.final[name], value, f"{name}, infinity on rank {rank}")
        assert result.states.keys() == expected.states.keys()
        for name, value in expected.states.items():
            assert_bits_equal(result.states[name], value, f"{name}, infinity on rank {rank}")

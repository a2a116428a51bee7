"""Any pipeline trains the same model: every schedule on every layout against the oracle. All schedules of one model and
batch give the same bits.

docs/invariants.md: I1 to I4, I6, I7.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.distributed.layout_cell import LAYOUT_FACTORS, Cell, make_cell
from tests.distributed.layout_expected import assert_as_expected, assert_same_bits, run
from tests.distributed.test_layouts import COMMUNICATION, distinct, in_turn, product, variants
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

RANKS = ("tp", "sequence_parallel", "dp")
SCHEDULES = LAYOUT_FACTORS["schedule"]
PIPELINES = [row for row in product("pp", "schedule") if row["pp"] > 1 or row["schedule"] != "1f1b"]
IDS = [f"pp{row['pp']}-{row['schedule']}" for row in PIPELINES]


def layouts(pipeline: Row) -> list[Row]:
    """Return the pipeline with each split over at most two tensor- and at most two data-parallel ranks."""
    rows = product("pp", "schedule", *RANKS)
    return [row for row in rows if row | pipeline == row and row["tp"] <= 2 and row["dp"] <= 2]


def communications(layout: Row) -> list[Row]:
    rows = [row for row in product("pp", "schedule", *RANKS, *COMMUNICATION) if row | layout == row]
    return [row for row in rows if distinct(row)]


def check(rank_pools: RankPools, cells: list[Cell]) -> None:
    for world_size in sorted({cell.world_size for cell in cells}):
        part = [cell for cell in cells if cell.world_size == world_size]
        for cell, result in zip(part, run(rank_pools, part), strict=True):
            assert_as_expected(cell, result)


def cells_of(pipeline: Row) -> list[Cell]:
    """Return each layout with every ZeRO stage that has several ranks; overlap, families and other factors take
    turns."""
    turn = PIPELINES.index(pipeline)
    in_order = itertools.cycle(variants()[7 * turn % len(variants()) :] + variants())
    cells = []
    for layout in layouts(pipeline):
        sharding = [row for row in communications(layout) if row["dp"] > 1 or row["zero"] == 0]
        stages = itertools.groupby(sharding, key=lambda row: row["zero"])
        for number, (_, ways) in enumerate(stages):
            choices = list(ways)
            cells.append(in_turn(choices[(turn + number) % len(choices)], in_order))
    return cells


def few_of(pipeline: Row) -> list[Cell]:
    """Return one of the cells, another for the next pipeline; test_layouts_steps.py covers all pairs of factors."""
    turn = PIPELINES.index(pipeline)
    cells = cells_of(pipeline)[turn % 6 :: 6]
    return [cells[turn // 3 % len(cells)]]


NAMES = ("pp2-1f1b", "pp2-gpipe", "pp2-interleaved-3", "pp3-zb-h1", "pp3-interleaved-2", "pp4-zb-v")
FIRST = [row for row, name in zip(PIPELINES, IDS, strict=True) if name in NAMES]
"""Pipelines of `make test`: every schedule, and two to four ranks."""


@pytest.mark.parametrize("pipeline", wide_except(PIPELINES, FIRST), ids=IDS)
def test_one_step_is_the_oracles(pipeline: Row, rank_pools: RankPools) -> None:
    check(rank_pools, few_of(pipeline))


@pytest.mark.wide
@pytest.mark.parametrize("pipeline", PIPELINES, ids=IDS)
def test_one_step_is_the_oracles_on_every_second_layout(pipeline: Row, rank_pools: RankPools) -> None:
    few = few_of(pipeline)
    check(rank_pools, [cell for cell in every_second(pipeline) if cell not in few])


def every_second(pipeline: Row) -> list[Cell]:
    """Return all cells of pipelines of two ranks, which alone have every layout, and half of those of the others."""
    cells = cells_of(pipeline)
    return cells if pipeline["pp"] == 2 else cells[PIPELINES.index(pipeline) % 2 :: 2]


def test_each_schedule_meets_each_layout() -> None:
    def met(cells: Callable[[Row], list[Cell]]) -> set[object]:
        """Return the schedules with the layouts and ZeRO stages that they have, whatever the number of ranks."""
        return {
            (cell.schedule, cell.tp, cell.sequence_parallel, cell.dp, cell.zero)
            for pipeline in PIPELINES
            if pipeline["pp"] > 1
            for cell in cells(pipeline)
        }

    assert met(every_second) == met(cells_of)


def test_every_schedule_zero_stage_and_split_is_among_the_few_of_some_pipeline() -> None:
    assert {row["schedule"] for row in FIRST} == set(SCHEDULES)
    met = [cell for pipeline in FIRST for cell in few_of(pipeline)]
    assert {cell.zero for cell in met} == {0, 1, 2, 3}
    assert {(cell.tp, cell.sequence_parallel, cell.dp) for cell in met} == {
        (tp, sequence_parallel, dp) for tp, sequence_parallel in ((1, False), (2, False), (2, True)) for dp in (1, 2)
    }
    assert all(few_of(pipeline) for pipeline in PIPELINES)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES, ids=IDS)
def test_one_step_is_the_oracles_in_the_full_product(pipeline: Row, rank_pools: RankPools) -> None:
    in_order = itertools.cycle(variants())
    rows = [row for layout in layouts(pipeline) for row in communications(layout)]
    check(rank_pools, [in_turn(row | {"family": family}, in_order) for row in rows for family in ("gpt2", "llama")])


@pytest.mark.bits
@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 3, "recompute": "uniform", "fused_loss": True},
        pytest.param(
            {"pp": 2, "dp": 2, "zero": 3, "overlap": "reduce and gather", "tied": False}, marks=pytest.mark.wide
        ),
        pytest.param({"pp": 2, "zero": 1, "tied": False}, marks=pytest.mark.wide),
        pytest.param({"pp": 4, "dp": 2, "overlap": "reduce"}, marks=pytest.mark.wide),
        pytest.param(
            {"pp": 2, "dp": 2, "zero": 3, "overlap": "reduce and gather", "fused_loss": True}, marks=pytest.mark.wide
        ),
        pytest.param(
            {"pp": 2, "tp": 2, "dp": 2, "sequence_parallel": True, "zero": 2, "tied": False}, marks=pytest.mark.wide
        ),
    ],
    ids=lambda layout: "-".join(f"{name}{value}" for name, value in layout.items()),
)
def test_all_schedules_give_the_same_bits(layout: Row, rank_pools: RankPools) -> None:
    """One stage gives the same bits too, with the same tensor- and data-parallel splits. Compared are losses, norms,
    gradients, and the weights after a clipped step.

    The weight is tied, which includes the untied case. But on one stage the gradients of its two uses are added before
    the sum over data-parallel ranks, on two stages after it.
    """
    rest = {"dp": 1, "family": "gpt2", "dropout": 0.1, "samples": 10}
    names = list(SCHEDULES)
    cells = [make_cell(rest | layout | {"schedule": name}, optimizer="adam", clip_grad=0.5) for name in names]
    first, *others = run(rank_pools, cells)
    for name, result in zip(names[1:], others, strict=True):
        assert_same_bits(result, first, f"{name} against {names[0]}")
    if cells[0].dp == 1 or not cells[0].tied:
        (alone,) = run(rank_pools, [replace(cells[0], pp=1)])
        assert_same_bits(first, alone, "1f1b against one stage")

"""Any layout trains the same model: one step of every layout against the oracle, which runs the whole batch at once.

Compared are initial weights, loss, every gradient, the gradient norm and the updated parameters. Replicas have the same
bits, and the boxes of all ranks tile each tensor (docs/invariants.md, I1 to I4, I6, I7).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import pytest

from tests.distributed.layout_cell import LAYOUT_FACTORS, MODEL_FACTORS, Cell, make_cell, valid
from tests.distributed.layout_expected import assert_as_expected, run
from tests.harness.covering_array import Row, covering_array, uncovered
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

RANKS = ("tp", "sequence_parallel", "dp")
COMMUNICATION = ("zero", "instances", "overlap")
VARIANT_FACTORS = MODEL_FACTORS | {
    name: LAYOUT_FACTORS[name] for name in ("recompute", "micro_batch_size", "fused_loss")
}
DROPOUT = (0.0, 0.1)
PLAINEST = {name: values[0] for name, values in (LAYOUT_FACTORS | MODEL_FACTORS).items()}


@cache
def variants() -> list[Row]:
    """Return rows with every pair of values: not when ranks import the module, since it takes a fifth of a second."""
    rows = covering_array(VARIANT_FACTORS, lambda row: True)
    parts = LAYOUT_FACTORS["mlp_parts"]
    return [
        row | {"dropout": DROPOUT[number % 2], "mlp_parts": parts[number // 2 % 2]} for number, row in enumerate(rows)
    ]


@cache
def product(*names: str) -> list[Row]:
    """Return the combinations of the named factors' values that occur in a valid cell."""
    factors = LAYOUT_FACTORS | MODEL_FACTORS
    rows = (dict(zip(names, values, strict=True)) for values in itertools.product(*(factors[name] for name in names)))
    return [row for row in rows if valid(PLAINEST | row)]


def distinct(row: Row) -> bool:
    """Tell whether the row differs in its communication from all others.

    A single rank shards nothing, and the extra communication of instances does not depend on what overlaps.
    """
    if row["dp"] == 1:
        return row["zero"] <= 1
    return row["instances"] == 1 or row["overlap"] == "reduce and gather"


def in_turn(row: Row, variants: Iterator[Row]) -> Cell:
    """Return the cell of a layout and of the next variant that can run on it."""
    return make_cell(next(variant | row for variant in variants if valid(PLAINEST | variant | row)))


LAYOUTS = product(*RANKS)
IDS = [f"tp{row['tp']}{'-sp' if row['sequence_parallel'] else ''}-dp{row['dp']}" for row in LAYOUTS]


def check(rank_pools: RankPools, cells: list[Cell]) -> None:
    for start in range(0, len(cells), 25):
        part = cells[start : start + 25]
        for cell, result in zip(part, run(rank_pools, part), strict=True):
            assert_as_expected(cell, result)


def cells_of(layout: Row) -> list[Cell]:
    """Return cells of a layout with each way of communication; the families and other factors take turns.

    With 8 ranks, every second way; with sequence parallelism, the others. Fewer ranks cover all of them.
    """
    rest = [row for row in product(*RANKS, *COMMUNICATION) if row | layout == row and distinct(row)]
    if layout["tp"] * layout["dp"] == 8:
        rest = rest[layout["sequence_parallel"] :: 2]
    first = len(rest) * LAYOUTS.index(layout) % len(variants())
    in_order = itertools.cycle(variants()[first:] + variants())
    families = itertools.cycle(("gpt2", "llama"))
    return [in_turn(row | {"family": next(families)}, in_order) for row in rest]


def few_of(layout: Row) -> list[Cell]:
    """Return every third cell, others for the next layout. If nothing is shared over data-parallel ranks, return all on
    two ranks, and every fourth on four: with one and with two groups of keys and values."""
    cells = cells_of(layout)
    if layout["dp"] == 1:
        return cells if layout["tp"] <= 2 else cells[::4]
    return cells[2 * LAYOUTS.index(layout) % 3 :: 3]


NAMES = ("tp1-dp1", "tp1-dp2", "tp1-dp3", "tp1-dp4", "tp1-dp8", "tp2-sp-dp4", "tp4-dp1")
"""Layouts that have all sizes and ways of communication."""
FIRST = [layout for layout, name in zip(LAYOUTS, IDS, strict=True) if name in NAMES]


@pytest.mark.parametrize("layout", wide_except(LAYOUTS, FIRST), ids=IDS)
def test_one_step_is_the_oracles(layout: Row, rank_pools: RankPools) -> None:
    check(rank_pools, few_of(layout))


@pytest.mark.wide
@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_one_step_is_the_oracles_in_every_way(layout: Row, rank_pools: RankPools) -> None:
    few = few_of(layout)
    check(rank_pools, [cell for cell in cells_of(layout) if cell not in few])


def test_every_way_of_communication_is_among_the_few() -> None:
    def ways(cells: Iterable[Cell]) -> set[tuple[Any, ...]]:
        return {tuple(getattr(cell, name) for name in COMMUNICATION) for cell in cells}

    all_there_are, few = (
        [cell for layout in layouts for cell in of(layout)] for layouts, of in ((LAYOUTS, cells_of), (FIRST, few_of))
    )
    assert ways(few) == ways(all_there_are)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_one_step_is_the_oracles_in_the_full_product(layout: Row, rank_pools: RankPools) -> None:
    """All layouts with all ways of communication, recomputations, families and ratios of key-value groups to ranks."""
    rest = product(*RANKS, *COMMUNICATION, "recompute", "family", "key_values")
    in_order = itertools.cycle(variants())
    check(rank_pools, [in_turn(row, in_order) for row in rest if row | layout == row])


def test_dropout_meets_what_must_not_change_it() -> None:
    few = [cell for layout in FIRST for cell in few_of(layout) if cell.dropout]
    for name in (*RANKS, *COMMUNICATION, "family", "mlp_parts", *VARIANT_FACTORS):
        assert {getattr(cell, name) for cell in few} == set((LAYOUT_FACTORS | MODEL_FACTORS)[name]), name


def test_the_variants_meet_in_pairs() -> None:
    assert not uncovered(VARIANT_FACTORS, lambda row: True, variants())


def test_no_two_shards_are_equal() -> None:
    """Two tensors are not equal either. Both would be if they were drawn from the same seed."""
    (result,) = run(RankPools(), [Cell(key_values="gqa", tied=False, vocabulary="odd")])
    rows = [
        row for name, tensor in result.initial.items() if tensor.dim() > 1 for row in tensor.flatten(0, -2).unbind()
    ]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)

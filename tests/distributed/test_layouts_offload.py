"""Optimizer state and slices of parameters on the host, on layouts: the same training, to the bit (docs/invariants.md).

Every rank checks meanwhile that no operator mixes the host's memory with the device's (`tests/harness/host_arena.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.distributed.layout_cell import Cell, make_cell
from tests.distributed.layout_cell import valid as can_run
from tests.distributed.layout_expected import assert_as_expected, assert_same_bits, run
from tests.distributed.test_layouts import PLAINEST
from tests.harness.covering_array import Row, covering_array, uncovered
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

FACTORS: dict[str, tuple[Any, ...]] = {
    "on_host": (1.0, 0.3),
    "arrive_late": (False, True),
    "slices_on_host": (False, True),
    "zero": (0, 1, 2, 3),
    "optimizer": ("adam", "sgd", "muon", "lars", "lamb", "lion", "adafactor"),
    "tp": (1, 2),
    "pp": (1, 2),
    "schedule": ("1f1b", "zb-v"),
    "dp": (1, 2, 3),
    "ep": (1, 2),
    "overlap": ("none", "reduce", "reduce and gather"),
    "recompute": ("none", "uniform"),
    "tied": (True, False),
    "clip_grad": (0.0, 0.5),
    "late_copies": (False, True),
}
"""Factors of offloading, and those of the layout that it meets."""
PLAIN = {name: value for name, value in PLAINEST.items() if name not in FACTORS}


class _Completed(dict[str, Any]):
    """Row with the plainest values for the factors of the matrix that it lacks."""

    def __missing__(self, name: str) -> Any:
        if name in FACTORS:
            raise KeyError(name)
        return PLAIN[name]


def valid(row: Row) -> bool:
    if row["slices_on_host"] and (row["zero"] != 3 or row["on_host"] < 1.0):
        return False
    if row["pp"] * row["tp"] * row["dp"] > 4 or (row["ep"] > 1 and (row["dp"] % row["ep"] or row["tp"] > 1)):
        return False
    if row["clip_grad"] and row["on_host"] < 1.0:  # the device clips its gradients in place, the host its copy of them
        return False
    return can_run(_Completed(row))


ROWS = covering_array(FACTORS, valid, cost=lambda row: row["pp"] * row["tp"] * row["dp"])


def cell_of(row: Row) -> Cell:
    """Return the cell of a row. Lion takes the sign of a gradient that is zero but for rounding if there are biases."""
    family = "mixtral" if row["ep"] > 1 else "llama" if row["optimizer"] == "lion" else "gpt2"
    return make_cell(PLAIN | row | {"family": family}, steps=2)


def test_every_pair_of_factors_meets() -> None:
    assert not uncovered(FACTORS, valid, ROWS)


@pytest.mark.wide
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_the_training_is_that_without_offloading(number: int, rank_pools: RankPools) -> None:
    cell = cell_of(ROWS[number])
    offloaded, plain = run(rank_pools, [cell, cell.on_device()])
    if cell.clip_grad:
        offloaded = replace(offloaded, gradients=plain.gradients)
    assert_as_expected(cell, offloaded)
    # Adafactor adds up the parts of a matrix in another order if it is divided between host and device. A single rank
    # of a kind of parameters has no slices without offloading: it sums their gradients as ZeRO 0 does.
    alone = cell.slices_on_host and cell.dp == cell.ep
    if not alone and not (cell.optimizer == "adafactor" and cell.on_host < 1.0):
        assert_same_bits(offloaded, plain, "offloaded")


@pytest.mark.parametrize(
    "kept", wide_except(["masters", "remainders and 8 bits", "16 bits"], ["remainders and 8 bits"])
)
def test_narrow_state_has_the_same_bits(kept: str, rank_pools: RankPools) -> None:
    """Blocks of 8 bits, remainders and the noise of stochastic rounding do not depend on where an element is."""
    narrow = {"masters": {}, "remainders and 8 bits": {"eight_bits": True}, "16 bits": {"narrow": True}}[kept]
    row = PLAINEST | {"dp": 2, "zero": 1, "on_host": 0.3, "optimizer": "adam", "dtype": "bfloat16"}
    cell = make_cell(row, steps=2, clip_grad=0.5 if narrow else 0.0, **narrow)
    offloaded, plain, late = run(
        rank_pools, [cell, cell.on_device(), replace(cell, on_host=1.0, arrive_late=True, late_copies=True)]
    )
    assert_same_bits(offloaded, plain, "a third of it offloaded")
    assert_same_bits(late, plain, "offloaded")


@pytest.mark.wide_except("True")
@pytest.mark.parametrize("late_copies", [False, True])
def test_a_skipped_step_leaves_the_gradients_of_the_next(late_copies: bool, rank_pools: RankPools) -> None:
    """Gradients that are on their way to the host when a step is skipped are not those of the next step."""
    row = PLAINEST | {"dp": 2, "zero": 1, "optimizer": "adam", "on_host": 1.0, "arrive_late": True, "overlap": "reduce"}
    cell = make_cell(row, steps=2, infinity_on=1, late_copies=late_copies)
    offloaded, plain = run(rank_pools, [cell, cell.on_device()])
    assert offloaded.skipped == [True, False]
    assert_same_bits(offloaded, plain, "offloaded")


def test_weights_are_there_before_they_are_used(rank_pools: RankPools) -> None:
    row = PLAINEST | {"optimizer": "adam", "on_host": 1.0, "arrive_late": True, "late_copies": True}
    cell = make_cell(row, steps=2)
    offloaded, plain = run(rank_pools, [cell, cell.on_device()])
    assert_same_bits(offloaded, plain, "offloaded")

"""A load, then a step, is the step of a run that never stopped, whatever part of the state is on the host.

The first step after a load shows state that was not brought to where the update reads it: an update from initial
masters, or with the number of another step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.layout_cell import Cell, make_cell
from tests.distributed.layout_expected import on_ranks
from tests.distributed.layout_run import SEED, Training, initialized_chunks, make_meshes
from tests.distributed.test_checkpoint_layouts import Pair, check, held
from tests.distributed.test_layouts import PLAINEST
from tests.harness.close import assert_bits_equal
from tests.harness.covering_array import Row, covering_array, every_value_once, uncovered
from tests.harness.rank_pool import RankPools

FACTORS: dict[str, tuple[Any, ...]] = {
    "before": (0.0, 0.3, 1.0),
    "after": (0.0, 0.3, 1.0),
    "slices_on_host": (False, True),
    "zero": (0, 1, 2, 3),
    "optimizer": ("adam", "sgd", "muon", "lars", "lamb", "lion", "adafactor"),
    "precision": ("fp64", "bf16", "16 bits", "8 bits"),
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp64": {},
    "bf16": {"dtype": "bfloat16"},
    "16 bits": {"dtype": "bfloat16", "narrow": True},
    "8 bits": {"dtype": "bfloat16", "eight_bits": True},
}


def valid(row: Row) -> bool:
    if row["slices_on_host"] and (row["zero"] != 3 or row["after"] < 1.0):
        return False
    if row["optimizer"] == "adafactor" and 0.3 in (row["before"], row["after"]):
        return False  # it adds up the parts of a matrix that is divided in another order
    if row["precision"] == "8 bits":
        return row["optimizer"] in ("adam", "sgd")
    return row["precision"] != "16 bits" or row["optimizer"] in ("adam", "sgd", "muon")


ROWS = covering_array(FACTORS, valid)
IN_MAKE_TEST = every_value_once(ROWS)


def cells_of(row: Row) -> tuple[Cell, Cell]:
    """Return the run that is saved and the one that loads. Lion's networks have no biases, as in other tests."""
    rest = {name: row[name] for name in ("zero", "optimizer")} | PRECISIONS[row["precision"]]
    family = "llama" if row["optimizer"] == "lion" else "gpt2"
    plain = make_cell(PLAINEST | {"dp": 2, "family": family} | rest)
    return (
        replace(plain, on_host=row["before"]),
        replace(plain, on_host=row["after"], slices_on_host=row["slices_on_host"], late_copies=True),
    )


def go_on(pairs: Sequence[tuple[Cell, Cell]], folders: Sequence[Path]) -> None:
    """Assert on a rank that each second cell goes on, after a load, as the first does without one."""
    meshes = make_meshes(cell for cells in pairs for cell in cells)
    for (before, after), folder in zip(pairs, folders, strict=True):
        mesh = meshes[before.split]
        running = Training(mesh, before, initialized_chunks(mesh, before))
        running.step(0)
        path = running.save(folder, 1)
        loss, result = running.step(1)
        loading = Training(mesh, after, initialized_chunks(mesh, after, SEED + 1))
        loading.step(5)  # it has state of its own, which the load replaces
        loading.load(path)
        assert loading.step(1) == (loss, result), f"[{before}] -> [{after}]"
        wanted = held(running)
        for name, values in held(loading).items():
            assert_bits_equal(values, wanted[name], f"{name} [{before}] -> [{after}]")


def test_every_pair_of_factors_meets() -> None:
    assert not uncovered(FACTORS, valid, ROWS)


def test_a_load_and_a_step_are_those_of_a_run_that_never_stopped(rank_pools: RankPools, tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(len(IN_MAKE_TEST))]
    on_ranks(rank_pools, 2, go_on, [cells_of(row) for row in IN_MAKE_TEST], folders)


@pytest.mark.wide
def test_more_loads_and_steps_are_those_of_a_run_that_never_stopped(rank_pools: RankPools, tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(len(ROWS))]
    on_ranks(rank_pools, 2, go_on, [cells_of(row) for row in ROWS], folders)


@pytest.mark.wide
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_a_training_goes_on_under_another_layout(optimizer: str, rank_pools: RankPools, tmp_path: Path) -> None:
    rows: list[Row] = [
        {"tp": 2, "dp": 2, "zero": 1, "on_host": 0.3, "tied": True},
        {"pp": 2, "dp": 2, "zero": 3, "on_host": 1.0, "slices_on_host": True, "tied": True},
    ]
    one, other = (make_cell(PLAINEST | row, optimizer=optimizer) for row in rows)
    check(rank_pools, [Pair(one, other), Pair(other, one)], tmp_path)

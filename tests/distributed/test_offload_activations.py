"""Offloaded activations give the bits of activations that stay, on every layout, by the copies that are declared.

`layout_run.Training` compares the copies of each step with the declared ones, and lets no operator mix the memory of
host and device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from megalite.config.offload import OffloadConfig
from tests.distributed.layout_cell import LAYOUT_FACTORS, Cell, make_cell, valid
from tests.distributed.layout_expected import assert_same_bits, run
from tests.distributed.test_layouts import PLAINEST
from tests.harness.covering_array import Row, covering_array, uncovered
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

MODULES = OffloadConfig(
    fine_grained_activation_offloading=True,
    offload_modules=("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"),
    min_offloaded_tensor_size=0,
)
OFFLOADS = {
    "1 layer": OffloadConfig(cpu_offloading_num_layers=1),
    "3 layers": OffloadConfig(cpu_offloading_num_layers=3, cpu_offloading_retain_pinned_cpu_buffers=True),
    "modules": MODULES,
    "some modules": replace(MODULES, activation_offload_fraction=0.3),
    "large tensors": replace(MODULES, offload_modules=("core_attn", "mlp_norm"), min_offloaded_tensor_size=100),
}
FACTORS = {name: values for name, values in LAYOUT_FACTORS.items() if name not in ("instances", "chunks")} | {
    "tp": (1, 2),
    "pp": (1, 2, 3),
    "dp": (1, 2),
    "cp": (1, 2),
    "way": ("p2p", "a2a"),
    "overlap": ("none", "reduce and gather"),
    "recompute": ("none", "selective", "uniform", "block", "experts"),
    "family": ("gpt2", "llama", "mixtral", "switch"),
    "key_values": ("few",),
    "dropout": (0.0, 0.1),
    "offload": tuple(OFFLOADS),
}
REST = {name: PLAINEST[name] for name in PLAINEST if name not in FACTORS}


def ranks(row: Row) -> int:
    return math.prod(row[name] for name in ("tp", "cp", "pp", "dp"))


def runs(row: Row) -> bool:
    """Tell whether a row, perhaps incomplete, can be run on at most four ranks."""
    if ranks(row) > 4 or not valid(_Filled(row)):
        return False
    of_layers = row["offload"] in ("1 layer", "3 layers")
    if row["mlp_parts"] > 1 and not of_layers:  # which offload the norm before feed-forward layers
        return False
    if row["recompute"] == "uniform" and not of_layers:
        return False
    has_experts = row["family"] in ("mixtral", "switch")
    if not has_experts:
        return row["ep"] == 1 and row["etp"] == 1 and row["recompute"] != "experts"
    if row["tp"] > 1 and not row["sequence_parallel"]:
        return False
    if row["cp"] > 1 and row["family"] == "switch":
        return False
    return row["recompute"] != "experts" or of_layers or row["offload"] == "large tensors"


class _Filled(dict):  # type: ignore[type-arg]
    """A row with the values of the factors that do not vary. Undecided factors are missing, as in the row."""

    def __missing__(self, name: str) -> object:
        return REST[name]


@cache
def rows() -> list[Row]:
    """Return rows with every pair of values. This takes seconds, so not when the module is imported."""
    return covering_array(FACTORS, runs, cost=lambda row: 1 + ranks(row), candidates=4, seed=3)


EVERYTHING = {"on_host": 1.0, "arrive_late": True, "slices_on_host": True}
"""Optimizer state and slices of the weights on the host, too."""
FEW: list[Row] = [
    {"tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "zb-h1", "offload": "modules", "dropout": 0.1},
    {"pp": 3, "schedule": "zb-v", "family": "gpt2", "mlp_parts": 3, "offload": "3 layers", "recompute": "selective"},
    {"pp": 2, "dp": 2, "schedule": "interleaved-2", "zero": 3, "overlap": "reduce and gather", "offload": "3 layers"},
    {"dp": 2, "ep": 2, "zero": 3, "family": "mixtral", "offload": "some modules"} | EVERYTHING,
    {"cp": 2, "dp": 2, "zero": 2, "family": "mixtral", "offload": "1 layer", "recompute": "experts"},
    {"family": "switch", "recompute": "uniform", "offload": "3 layers", "dropout": 0.1},
    {"pattern": "MG*-", "offload": "modules", "dropout": 0.1},
    {"pattern": "GM-E", "family": "mixtral", "cp": 2, "offload": "some modules", "recompute": "selective"},
    {"pattern": "M-|G*", "pp": 2, "offload": "1 layer", "recompute": "selective"},
    {"pattern": "+-G+", "latents": "narrow values", "qk_layernorm": True, "cp": 2, "offload": "modules"},
    {"pattern": "D-+D", "latents": "few", "indexing": "few", "tp": 2, "cp": 2, "offload": "modules"},
]
"""Rows with what is not the plainest in them."""


def check(rank_pools: RankPools, rows: Sequence[Row]) -> None:
    """Run two steps of each row with activations that are offloaded and that stay, and compare the bits.

    Optimizer state and slices of the weights stay where they are: slices on the host may sum in another order, as
    `test_layouts_offload` says.
    """
    for size in sorted({ranks(row) for row in rows}):
        cells = [cell_of(row, late=number % 2 == 1) for number, row in enumerate(rows) if ranks(row) == size]
        results = run(rank_pools, [each for cell in cells for each in (cell, replace(cell, offload=None))])
        for cell, offloaded, plain in zip(cells, results[::2], results[1::2], strict=True):
            assert_same_bits(offloaded, plain, str(cell))


def cell_of(row: Row, *, late: bool) -> Cell:
    """Return the cell of a row. `late`: copies are made as late as the code allows, otherwise as soon as it does."""
    chosen = {name: value for name, value in row.items() if name != "offload"}
    return make_cell(chosen, steps=2, optimizer="adam", samples=4, late_copies=late, offload=OFFLOADS[row["offload"]])


@pytest.mark.parametrize("number", wide_except(range(len(FEW)), [2]))
def test_bits_are_those_of_activations_that_stay(number: int, rank_pools: RankPools) -> None:
    plain = {name: values[0] for name, values in FACTORS.items()} | {"family": "llama"}
    check(rank_pools, [plain | FEW[number]])


@pytest.mark.wide
def test_bits_are_those_of_activations_that_stay_on_pairs_of_factors(rank_pools: RankPools) -> None:
    assert not uncovered(FACTORS, runs, rows())
    check(rank_pools, rows())


@pytest.mark.wide
def test_compiled_layers_offload(rank_pools: RankPools) -> None:
    cell = Cell(family="llama", compiled="aot_eager", recompute="block", steps=2)
    (plain,) = run(rank_pools, [cell])
    (offloaded,) = run(rank_pools, [replace(cell, offload=OFFLOADS["3 layers"])])
    assert_same_bits(offloaded, plain, str(cell))

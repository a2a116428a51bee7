"""The mean of the weights (--ema-decay) on layouts: the oracle's under all rules, and loaded under any layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.layout_cell import Cell, make_cell
from tests.distributed.layout_expected import assert_as_expected, assert_same_bits, run, run_each
from tests.distributed.test_checkpoint_layouts import Pair, check_by_world_size
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

DECAY = 0.7
ROWS: dict[str, tuple[Row, str]] = {
    "one": ({"family": "gpt2", "tied": True, "key_values": "mqa"}, "adam"),
    "tied weights on two stages": ({"pp": 2, "family": "gpt2", "tied": True, "key_values": "mqa"}, "adam"),
    "replicas of keys": ({"tp": 2, "sequence_parallel": True, "family": "llama", "key_values": "uneven6"}, "muon"),
    "zero 3": ({"dp": 2, "zero": 3, "family": "llama", "overlap": "reduce and gather"}, "sgd"),
    "zero 1": ({"tp": 2, "dp": 2, "zero": 1, "family": "llama", "overlap": "reduce"}, "lamb"),
    "experts": ({"dp": 2, "ep": 2, "zero": 1, "family": "mixtral"}, "adafactor"),
    "zb-v": ({"pp": 2, "dp": 2, "zero": 2, "schedule": "zb-v", "family": "llama"}, "lars"),
    "instances": ({"dp": 4, "zero": 3, "instances": 2, "family": "llama"}, "lion"),
}


def cell_of(name: str) -> Cell:
    row, rule = ROWS[name]
    return make_cell({"dp": 1} | row, optimizer=rule, clip_grad=0.5, steps=2, ema_decay=DECAY)


@pytest.mark.parametrize(
    "names", [["tied weights on two stages", "zero 3", "experts"], pytest.param([*ROWS], marks=pytest.mark.wide)]
)
def test_the_mean_is_the_oracles(names: list[str], rank_pools: RankPools) -> None:
    cells = [cell_of(name) for name in names]
    for cell, result in zip(cells, run_each(rank_pools, cells), strict=True):
        assert_as_expected(cell, result)


@pytest.mark.wide
def test_it_is_that_of_clipped_weights(rank_pools: RankPools) -> None:
    row = {"tp": 2, "dp": 2, "family": "llama", "key_values": "uneven6", "zero": 1}
    cell = make_cell(row, optimizer="adam", steps=2, ema_decay=DECAY, qk_clip=0.05)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.wide
@pytest.mark.bits
def test_slices_on_the_host_change_no_bit_of_it(rank_pools: RankPools) -> None:
    training = {"optimizer": "adam", "steps": 2, "ema_decay": DECAY, "dtype": "float32"}
    ways: list[Row] = [{}, {"on_host": 1.0, "slices_on_host": True}]
    cells = [make_cell({"dp": 2, "zero": 3, "family": "llama"} | way, **training) for way in ways]
    first, second = run(rank_pools, cells)
    assert_same_bits(second, first, "slices on the host")


@pytest.mark.bits
def test_zero_and_the_host_change_no_bit_of_it(rank_pools: RankPools) -> None:
    """In fp32, where a product and a sum in one operation would round otherwise at the ends of slices."""
    training = {"optimizer": "adam", "steps": 2, "ema_decay": DECAY, "dtype": "float32"}
    ways: list[Row] = [{"zero": 0}, {"zero": 1}, {"zero": 1, "on_host": 0.3}]
    rest = {"dp": 2, "family": "llama", "key_values": "mqa"}
    first, *others = run(rank_pools, [make_cell(rest | way, **training) for way in ways])
    for way, result in zip(ways[1:], others, strict=True):
        assert_same_bits(result, first, f"{way}")


PAIRS: dict[str, tuple[str, str]] = {
    "tied": ("one", "tied weights on two stages"),
    "sharded": ("zero 3", "zero 1"),
    "replicas": ("replicas of keys", "one"),
    "experts": ("experts", "experts"),
}


@pytest.mark.bits
@pytest.mark.parametrize("name", wide_except(PAIRS, ["tied"]))
def test_a_training_goes_on_under_another_layout(name: str, rank_pools: RankPools, tmp_path: Path) -> None:
    first, second = PAIRS[name]
    model = {key: value for key, value in ROWS[first][0].items() if key in ("family", "tied", "key_values")}
    training = {"optimizer": ROWS[first][1], "clip_grad": 0.5, "ema_decay": DECAY}
    saving, loading = (make_cell({"dp": 1} | ROWS[each][0] | model, **training) for each in (first, second))
    check_by_world_size(rank_pools, [Pair(saving, loading)], tmp_path)

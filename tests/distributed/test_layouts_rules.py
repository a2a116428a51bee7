"""LARS, LAMB, Lion and Adafactor on layouts, against the same rules by hand (docs/invariants.md: I5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalite.config.optimizer import RULE_FLAGS
from tests.distributed.layout_cell import Cell, make_cell
from tests.distributed.layout_expected import assert_as_expected, assert_same_bits, run
from tests.distributed.test_checkpoint_layouts import Pair, check
from tests.distributed.test_layouts import PLAINEST
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except
from tests.rules import RULES

STEPS = 3
FEW: list[Row] = [
    {"tp": 2, "dp": 2, "sequence_parallel": True, "zero": 1, "key_values": "uneven6", "overlap": "reduce and gather"},
    {"pp": 2, "dp": 2, "zero": 3, "tied": True, "family": "gpt2"},
    {"dp": 4, "ep": 2, "zero": 2, "instances": 2, "family": "mixtral"},
]
"""Layouts for every run. With uneven6, a key-value group is replicated on two ranks, beside others that are not."""
REST: list[Row] = [
    {},
    {"family": "gpt2", "tp": 2, "vocabulary": "empty"},
    {"tp": 4, "key_values": "few", "zero": 1, "qk_layernorm": True},
    {"dp": 3, "zero": 1, "overlap": "reduce"},
    {"pp": 2, "dp": 2, "tied": False, "schedule": "zb-v", "zero": 2},
    {"cp": 2, "tp": 2, "zero": 3},
    {"dp": 2, "ep": 2, "zero": 3, "family": "deepseek"},
    {"dp": 4, "ep": 2, "zero": 2, "family": "switch"},
    {"dp": 4, "instances": 2, "zero": 2},
    {"tp": 2, "dp": 2, "ep": 2, "etp": 2, "sequence_parallel": True, "zero": 1, "family": "mixtral"},
    {"tp": 2, "zero": 0, "key_values": "uneven6"},
]


def cells(rule: str, rows: list[Row], **training: Any) -> list[Cell]:
    """Return the cells of a rule.

    The gradient of a key's bias is zero except for rounding, and Lion takes its sign: it has networks without biases.
    """
    made = [PLAINEST | {"family": "llama"} | row for row in rows]
    if rule == "lion":
        made = [row | ({"family": "llama"} if row["family"] in ("gpt2", "switch") else {}) for row in made]
        made = [row | ({"ep": 1} if row["family"] == "llama" else {}) for row in made]
    return [make_cell(row, optimizer=rule, **training) for row in made]


def check_cells(rank_pools: RankPools, wanted: list[Cell]) -> None:
    for size in sorted({cell.world_size for cell in wanted}):
        those = [cell for cell in wanted if cell.world_size == size]
        for cell, result in zip(those, run(rank_pools, those), strict=True):
            assert_as_expected(cell, result)


def test_every_plain_rule_is_tested_here() -> None:
    assert RULES.keys() == {name for name, row in RULE_FLAGS.items() if row.plain}


@pytest.mark.parametrize("rule", wide_except(RULES, ["adafactor"]))
def test_steps_are_those_of_the_rule_by_hand(rule: str, rank_pools: RankPools) -> None:
    check_cells(rank_pools, cells(rule, FEW, steps=2, clip_grad=0.5))


@pytest.mark.wide
@pytest.mark.parametrize("rule", RULES)
def test_steps_on_more_layouts_are_those_of_the_rule_by_hand(rule: str, rank_pools: RankPools) -> None:
    check_cells(rank_pools, cells(rule, REST, steps=STEPS, dropout=0.1))


@pytest.mark.wide
@pytest.mark.parametrize("network", wide_except(["dense", "experts"], ["dense"]))
@pytest.mark.parametrize("rule", wide_except(RULES, ["adafactor"]))
def test_a_training_goes_on_under_another_layout(
    rule: str, network: str, rank_pools: RankPools, tmp_path: Path
) -> None:
    """Check the bits of all that is saved and loaded, a step after a save and after a load, and the steps by hand."""
    rows: dict[str, list[Row]] = {
        "dense": [
            {"tp": 2, "dp": 2, "zero": 1, "key_values": "uneven6", "tied": True, "family": "gpt2"},
            {"pp": 2, "dp": 2, "zero": 3, "key_values": "uneven6", "tied": True, "family": "gpt2"},
        ],
        "experts": [
            {"tp": 2, "dp": 2, "ep": 2, "etp": 2, "sequence_parallel": True, "zero": 2, "family": "mixtral"},
            {"dp": 4, "ep": 4, "zero": 1, "family": "mixtral"},
        ],
    }
    check(rank_pools, [Pair(*cells(rule, rows[network]))], tmp_path)


@pytest.mark.wide
@pytest.mark.bits
def test_adafactors_stages_give_the_same_bits(rank_pools: RankPools) -> None:
    """Sums of rows and columns are those of the same slices. Overlap, and ZeRO 2 and 3, slice otherwise."""
    row = {"tp": 2, "dp": 2, "sequence_parallel": True, "key_values": "mqa"}
    made = cells("adafactor", [row | {"zero": stage} for stage in range(4)], steps=2)
    unsharded, sharded, gradients_too, all_sharded = run(rank_pools, made)
    assert_same_bits(sharded, unsharded, "ZeRO 1 against ZeRO 0")
    assert_same_bits(all_sharded, gradients_too, "ZeRO 3 against ZeRO 2")

"""Ranks of ZeRO 3 that gather codes of weights train as those that gather values, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config.offload import OffloadConfig
from tests.distributed.layout_cell import make_cell
from tests.distributed.layout_expected import assert_as_expected, assert_same_bits, run
from tests.distributed.test_checkpoint_layouts import Pair, check
from tests.distributed.test_layouts_rounding import SP, SQUARES, WHOLE
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

SMALL: Row = {**SQUARES, "wide": 2}  # with short squares: no rank may split them
LAYOUTS: dict[str, Row] = {
    "squares": {**SMALL, "dp": 2, "overlap": "reduce and gather", "recompute": "uniform", "plain_layers": (3,)},
    "squares, hybrid": {**SMALL, "dp": 2, "hybrid": True, "rounds_weight_gradients": True, "family": "gpt2"},
    "squares, instances": {**SMALL, "dp": 4, "instances": 2, "documents": True, "overlap": "reduce"},
    "squares, tp2-sp": {**SQUARES, **SP, "dp": 2, "recompute": "selective"},
    "squares, cp2": {**SMALL, "dp": 1, "cp": 2, "mlp_parts": 3},
    "squares, experts": {**SMALL, "dp": 2, "family": "mixtral", "overlap": "reduce and gather"},
    "squares, ep2": {**SMALL, "dp": 4, "ep": 2, "family": "nemotron", "recompute": "experts"},
    "squares, pp2, deferred": {**SMALL, "dp": 2, "pp": 2, "schedule": "zb-h1"},
    "squares, pp2 in a v": {**SMALL, "dp": 2, "pp": 2, "schedule": "zb-v", "tied": False, "recompute": "block"},
    "whole": {**WHOLE, "dp": 2, "plain_layers": (0,), "key_values": "gqa"},
    "whole, tp2": {**WHOLE, "dp": 2, "tp": 2, "overlap": "reduce and gather"},
    "whole, tp2-sp, deferred": {**WHOLE, "dp": 2, **SP, "pp": 1, "recompute": "uniform"},
    "whole, experts": {**WHOLE, "dp": 2, "family": "mixtral"},
    "latents": {**SMALL, "dp": 2, "latents": "blocks", "qk_layernorm": True},
    "recurrent": {**SMALL, "dp": 2, "pattern": "MGK-", "overlap": "reduce"},
    "depths": {**WHOLE, "dp": 2, "depths": 1},
    "depths, repeated": {**SMALL, "dp": 2, "depths": 2, "repeated": True},
}
TRAINING = {"steps": 2, "optimizer": "adam", "clip_grad": 0.5, "cp": 1, "zero": 3}


@pytest.mark.bits
@pytest.mark.parametrize("name", wide_except(LAYOUTS, ["squares"]))
def test_no_bit_changes(name: str, rank_pools: RankPools) -> None:
    cell = make_cell(TRAINING | LAYOUTS[name])
    plain, coded = run(rank_pools, [cell, replace(cell, gathers_codes=True)])
    assert_same_bits(coded, plain, name)


@pytest.mark.wide
@pytest.mark.bits
@pytest.mark.parametrize(
    "more",
    [
        {"dtype": "bfloat16"},
        {"optimizer": "muon"},
        {"optimizer": "adam", "qk_clip": 0.01},
        {"narrow": True, "dtype": "bfloat16"},
        {"ema_decay": 0.5, "infinity_on": 1},
        {"on_host": 1.0, "slices_on_host": True, "arrive_late": True},
        {"on_host": 0.5, "slices_on_host": True, "clip_grad": 0.0},
        {"offload": OffloadConfig(fine_grained_activation_offloading=True)},
        {"compiled": "aot_eager"},
        {"adapters": "some"},
    ],
    ids=lambda more: ", ".join(f"{name} {value}" for name, value in more.items() if name != "offload") or "offload",
)
def test_no_bit_changes_with_what_reads_or_moves_weights(more: Row, rank_pools: RankPools) -> None:
    cell = make_cell(TRAINING | SMALL | {"dp": 2, "overlap": "reduce and gather"} | more)
    plain, coded = run(rank_pools, [cell, replace(cell, gathers_codes=True)])
    assert_same_bits(coded, plain, str(more))


@pytest.mark.wide
@pytest.mark.parametrize("name", ["squares", "whole, tp2"])
def test_steps_are_the_oracles(name: str, rank_pools: RankPools) -> None:
    cell = make_cell({"cp": 1, "zero": 3} | LAYOUTS[name] | {"gathers_codes": True}, steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.wide
def test_a_checkpoint_goes_on_with_and_without(rank_pools: RankPools, tmp_path: Path) -> None:
    """It has the same tensors."""
    plain = make_cell({"cp": 1} | LAYOUTS["whole"], zero=3, optimizer="adam", samples=4)
    coded = replace(plain, gathers_codes=True)
    check(rank_pools, [Pair(plain, coded), Pair(coded, replace(plain, zero=1)), Pair(coded, coded)], tmp_path)

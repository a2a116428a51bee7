"""Depths of multi-token prediction on layouts that split the network in every way: steps against the oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config.offload import OffloadConfig
from tests.distributed.layout_cell import LAYERS, make_cell
from tests.distributed.layout_expected import assert_as_expected, assert_same_bits, run
from tests.distributed.test_checkpoint_layouts import Pair, check
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

SP = {"tp": 2, "sequence_parallel": True}
REPEATED = {"depths": 2, "repeated": True}
DETACHED = {"depths": 2, "detached": True}
LATENTS = {"latents": "narrow values", "qk_layernorm": True, "family": "llama"}
LAYOUTS: dict[str, Row] = {
    "one depth": {"dp": 1, "depths": 1, "micro_batch_size": 2},
    "two depths": {"dp": 1, "depths": 2, "documents": True, "loss_mask": "random"},
    "more depths than what a document has left": {"dp": 1, "depths": 5, "documents": True, "family": "gemma"},
    "repeated": {"dp": 1, **REPEATED, "loss_terms": True, "fused_loss": True},
    "repeated, recomputed": {"dp": 1, "depths": 3, "repeated": True, "recompute": "uniform", "mlp_parts": 3},
    "detached": {"dp": 1, "depths": 2, "detached": True, "tied": False},
    "tp2": {"dp": 1, "tp": 2, "depths": 2, "key_values": "uneven6", "vocabulary": "odd"},
    "tp2-sp": {"dp": 1, **SP, "depths": 2, "documents": True, "family": "neox"},
    "tp2-sp, detached, fused": {"dp": 1, **SP, "depths": 2, "detached": True, "fused_loss": True},
    "tp2-sp, repeated": {"dp": 1, **SP, **REPEATED, "fused_loss": True, "recompute": "block"},
    "cp2": {"dp": 1, "cp": 2, "depths": 2, "documents": True, "loss_mask": "random"},
    "cp2-tp2-sp, dealt": {"dp": 1, "cp": 2, **SP, "chunks": 2, "depths": 2, "documents": True},
    "pp2": {"dp": 1, "pp": 2, "depths": 1},
    "pp2, untied": {"dp": 1, "pp": 2, "depths": 2, "tied": False, "loss_mask": "random"},
    "pp2, repeated, untied": {"dp": 1, "pp": 2, **REPEATED, "tied": False, "schedule": "zb-h1"},
    "pp2, detached, untied": {"dp": 1, "pp": 2, "depths": 2, "tied": False, "detached": True},
    "pp2, detached": {"dp": 2, "pp": 2, "depths": 2, "detached": True, "zero": 1, "schedule": "zb-h1"},
    "pp3, standalone": {"dp": 1, "pp": 3, "depths": 2, "standalone": True},
    "pp2 interleaved": {"dp": 1, "pp": 2, "schedule": "interleaved-2", "depths": 2, "recompute": "uniform"},
    "pp2 interleaved, untied, standalone": {
        "dp": 1,
        "pp": 2,
        "schedule": "interleaved-2",
        "depths": 1,
        "tied": False,
        "standalone": True,
    },
    "pp2 in a v": {"dp": 1, "pp": 2, "schedule": "zb-v", "depths": 2, "documents": True},
    "pp2 in a v, untied": {"dp": 2, "pp": 2, "schedule": "zb-v", "depths": 2, "tied": False, "zero": 1},
    "pp2 in a v, detached, repeated": {"dp": 1, "pp": 2, "schedule": "zb-v", **REPEATED, "detached": True},
    "zero1": {"dp": 2, "zero": 1, "depths": 2, "loss_mask": "random"},
    "zero2": {"dp": 2, "zero": 2, **REPEATED, "overlap": "reduce"},
    "zero3": {"dp": 2, "zero": 3, "depths": 2, "overlap": "reduce and gather"},
    "zero3, repeated, recomputed": {"dp": 2, "zero": 3, **REPEATED, "recompute": "uniform"},
    "zero3-pp2, untied, detached": {"dp": 2, "zero": 3, "pp": 2, "tied": False, **DETACHED, "fused_loss": True},
    "zero3-pp2-tp2-sp": {"dp": 2, "zero": 3, "pp": 2, **SP, "depths": 2},
    "experts": {"dp": 2, "ep": 2, "depths": 2, "family": "mixtral", "documents": True},
    "experts, pp2, tp2-sp": {"dp": 1, **SP, "pp": 2, "depths": 1, "family": "deepseek"},
    "experts, cp2, recomputed": {"dp": 1, "cp": 2, "ep": 2, "depths": 2, "family": "deepseek", "recompute": "experts"},
    "letters": {"dp": 1, "pattern": "*-M", "depth_letters": "M*-", "depths": 2, "documents": True},
    "letters, pp2, cp2": {"dp": 1, "pp": 2, "cp": 2, "pattern": "*-|G", "depth_letters": "G-", "depths": 2},
    "letters, experts": {"dp": 2, "pattern": "*-E", "depth_letters": "*E", "depths": 1, "family": "mixtral", "zero": 3},
    "norms behind": {"dp": 1, "cp": 2, "depths": 2, "output_norm_freq": "[0,1,1,1]", "recompute": "selective"},
    "latents, experts": {"dp": 2, "ep": 2, "depths": 2, **LATENTS, "family": "deepseek", "documents": True},
    "latents, pp2, tp2-sp": {"dp": 1, **SP, "pp": 2, "depths": 1, **LATENTS, "tied": False, "schedule": "zb-h1"},
    "latents, letters, cp2": {"dp": 1, "cp": 2, "pattern": "+-G", "depth_letters": "+-", "depths": 2, **LATENTS},
    "latents, repeated": {"dp": 1, "cp": 2, **REPEATED, **LATENTS, "recompute": "uniform", "documents": True},
    "letters, repeated": {"dp": 1, "pattern": "*-", "depth_letters": "*-*", **REPEATED, "tp": 2, "recompute": "block"},
}


OFTEN = [
    "tp2-sp, detached, fused",
    "pp3, standalone",
    "pp2 in a v, untied",
    "zero3, repeated, recomputed",
    "letters, pp2, cp2",
]
LOADS: dict[str, tuple[Row, Row]] = {
    "the same": ({"dp": 1, "depths": 2}, {"dp": 1, "depths": 2}),
    "zero3 to pp2": ({"dp": 2, "zero": 3, **REPEATED}, {"dp": 1, "pp": 2, **REPEATED}),
    "pp2 to tp2": (
        {"dp": 1, "pp": 2, "depths": 2, "tied": False, "standalone": True},
        {"dp": 1, "tp": 2, "depths": 2, "tied": False},
    ),
    "pattern to GPT": (
        {"dp": 1, "pattern": "*-" * LAYERS, "depth_letters": "*-", "depths": 1},
        {"dp": 1, "pp": 2, "depths": 1},
    ),
}
SAME_BITS: dict[str, tuple[Row, list[Row]]] = {
    "recomputation": (
        {"depths": 2, "documents": True},
        [{"recompute": how} for how in ("uniform", "block", "selective")],
    ),
    "recomputation of repeated layers": (REPEATED, [{"recompute": "uniform"}]),
    "recomputation of experts": (
        {"depths": 2, "family": "mixtral"},
        [{"recompute": "experts"}, {"recompute": "uniform"}],
    ),
    "schedules": ({"pp": 2, "depths": 2, "tied": False}, [{"schedule": "gpipe"}, {"schedule": "zb-h1"}]),
    "schedules of repeated layers": ({"pp": 2, **REPEATED}, [{"schedule": "gpipe"}, {"schedule": "zb-h1"}]),
    "pattern of halves": ({**REPEATED, "cp": 2}, [{"pattern": "*-" * LAYERS, "depth_letters": "*-"}]),
    "offloading": (
        {"depths": 2},
        [
            {"offload": OffloadConfig(cpu_offloading_num_layers=LAYERS)},
            {"offload": OffloadConfig(cpu_offloading_num_layers=1), "recompute": "uniform"},
        ],
    ),
}


@pytest.mark.parametrize("name", wide_except(LAYOUTS, OFTEN))
def test_steps_are_the_oracles(name: str, rank_pools: RankPools) -> None:
    row = {"cp": 1, "family": "llama"} | LAYOUTS[name]
    cell = make_cell(row, dropout=0.1 * (list(LAYOUTS).index(name) % 2), steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.parametrize("name", wide_except(SAME_BITS, ["schedules of repeated layers"]))
def test_what_changes_no_sum_changes_no_bit(name: str, rank_pools: RankPools) -> None:
    row, others = SAME_BITS[name]
    cell = make_cell({"cp": 1, "dp": 1, "family": "llama"} | row, dropout=0.1, steps=2, optimizer="adam")
    plain, *results = run(rank_pools, [cell, *(replace(cell, **other) for other in others)])
    for other, result in zip(others, results, strict=True):
        assert_same_bits(result, plain, str(other))


@pytest.mark.parametrize("name", wide_except(LOADS, ["pp2 to tp2"]))
def test_a_checkpoint_goes_on_under_another_layout(name: str, rank_pools: RankPools, tmp_path: Path) -> None:
    rows = ({"cp": 1, "family": "llama"} | row for row in LOADS[name])
    saving, loading = (make_cell(row, optimizer="adam", samples=4) for row in rows)
    check(rank_pools, [Pair(saving, loading)], tmp_path)


@pytest.mark.wide
def test_the_projection_is_a_matrix_of_muon(rank_pools: RankPools) -> None:
    row = {"cp": 1, "family": "llama", "dp": 2, "zero": 1, **SP, "depths": 2}
    cell = make_cell(row, optimizer="muon", steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)

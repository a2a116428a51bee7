"""Products of rounded operands on layouts that split the network in every way: steps against the oracle, and bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.layout_cell import make_cell
from tests.distributed.layout_expected import assert_as_expected, assert_same_bits, run
from tests.distributed.test_checkpoint_layouts import Pair, check
from tests.distributed.test_layouts_context import collectives_called
from tests.harness.close import assert_gradient_close
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

SP = {"tp": 2, "sequence_parallel": True}
FP4: Row = {"recipe": "nvfp4", "wide": 2, "family": "llama"}
MX: Row = {"recipe": "mxfp8", "wide": 4, "family": "llama"}
SQUARES: Row = {"recipe": "blockwise", "wide": 16, "family": "llama"}
WHOLE: Row = {"recipe": "tensorwise", "wide": 2, "family": "llama"}
AGAIN: Row = {"stores_activations": True}
LAYOUTS: dict[str, Row] = {
    "mx": {**MX, "dp": 1, "documents": True},
    "mx, weight gradients": {**MX, "dp": 1, "rounds_weight_gradients": True, "output_gate": True},
    "mx, tp2": {**MX, "tp": 2, "dp": 1, "family": "gpt2"},
    "mx, tp2-sp": {**MX, **SP, "dp": 1, "recompute": "selective"},
    "mx, tp4-sp": {**MX, "wide": 8, "tp": 4, "sequence_parallel": True, "dp": 1},
    "mx, tp2-sp, weight gradients": {**MX, **SP, "dp": 1, "rounds_weight_gradients": True},
    "mx, pp2": {**MX, "dp": 2, "pp": 2, "schedule": "interleaved-2", "plain_layers": (0, 3)},
    "mx, pp2, deferred": {**MX, "dp": 1, "pp": 2, **SP, "schedule": "zb-h1"},
    "mx, pp2 in a v": {**MX, "dp": 1, "pp": 2, "schedule": "zb-v", "tied": False, "rounds_weight_gradients": True},
    "mx, zero3": {**MX, "dp": 2, "zero": 3, "overlap": "reduce and gather", "recompute": "uniform"},
    "mx, zero3, tp2-sp": {**MX, "dp": 2, "zero": 3, **SP, "mlp_parts": 3},
    "mx, cp2": {**MX, "dp": 1, "cp": 2, "documents": True},
    "mx, cp2-tp2-sp": {**MX, "dp": 1, "cp": 2, "way": "all_gather", **SP},
    "mx, experts": {**MX, "dp": 2, "ep": 2, "family": "nemotron", "zero": 1},
    "mx, experts, tp2-sp": {**MX, "dp": 1, **SP, "ep": 2, "family": "mixtral", "recompute": "experts"},
    "mx, experts, zero3": {**MX, "dp": 2, "zero": 3, "family": "mixtral", "overlap": "reduce"},
    "fp4, experts, etp2": {**FP4, **SP, "dp": 1, "etp": 2, "family": "mixtral"},
    "fp4, experts, ep2-etp2": {**FP4, "dp": 2, **SP, "ep": 2, "etp": 2, "family": "mixtral", "documents": True},
    "squares, experts": {**SQUARES, "dp": 2, "ep": 2, "wide": 8, "family": "switch"},
    "mx, zero1, late gathers": {**MX, "dp": 2, "zero": 1, "overlap": "reduce and gather", "tp": 2},
    "mx, late weights": {**MX, "dp": 2, "zero": 1, "on_host": 0.5, "arrive_late": True, "overlap": "reduce"},
    "mx, zero3, slices on the host": {**MX, "dp": 2, "zero": 3, "on_host": 1.0, "slices_on_host": True, **SP},
    "whole, experts": {**WHOLE, "dp": 1, **SP, "ep": 2, "family": "mixtral"},
    "fp4": {**FP4, "dp": 1, "plain_layers": (0,), "key_values": "gqa"},
    "fp4, tp2": {**FP4, "dp": 1, "tp": 2, "recompute": "block"},
    "fp4, tp2-sp": {**FP4, "dp": 1, **SP, "key_values": "gqa", "output_gate": True},
    "fp4, tp2-sp, zero2": {**FP4, "dp": 2, "zero": 2, **SP, "documents": True},
    "fp4, tp4": {**FP4, "wide": 4, "dp": 1, "tp": 4},
    "fp4, cp2, pp2": {**FP4, "dp": 1, "cp": 2, "pp": 2, "schedule": "zb-h1", "micro_batch_size": 2},
    "fp4, short convolutions": {**FP4, "dp": 1, **SP, "pattern": "L-*-"},
    "squares": {**SQUARES, "dp": 1, "rounds_weight_gradients": True, "hybrid": True},
    "squares, tp2-sp": {**SQUARES, "dp": 1, **SP, "hybrid": True},
    "whole": {**WHOLE, "dp": 1, "hybrid": True},
    "whole, tp2": {**WHOLE, "dp": 1, "tp": 2, "rounds_weight_gradients": True},
    "whole, tp2-sp": {**WHOLE, "dp": 1, **SP, "rounds_weight_gradients": True, "recompute": "uniform"},
    "whole, cp2": {**WHOLE, "dp": 1, "cp": 2, "documents": True, "rounds_weight_gradients": True},
    "whole, cp2-tp2-sp": {**WHOLE, "dp": 1, "cp": 2, **SP, "hybrid": True},
    "whole, cp2, heads exchanged": {**WHOLE, "dp": 1, "cp": 2, "way": "a2a", "tp": 2},
    "whole, pp2, deferred": {**WHOLE, **SP, "pp": 2, "dp": 1, "schedule": "zb-h1", "rounds_weight_gradients": True},
    "whole, activations again": {**WHOLE, **SP, "dp": 1, "cp": 2, "rounds_weight_gradients": True, **AGAIN},
    "squares, activations again": {**SQUARES, **SP, "dp": 1, "hybrid": True, **AGAIN, "family": "gpt2"},
    "mx, activations again": {**MX, **SP, "dp": 1, "pp": 2, "schedule": "zb-h1", **AGAIN, "plain_layers": (0,)},
    "mx, activations of parts again": {**MX, "tp": 2, "dp": 1, "mlp_parts": 3, **AGAIN},
    "mx, experts' activations again": {**MX, **SP, "dp": 1, "ep": 2, "family": "mixtral", **AGAIN},
    "mx, shared experts' activations again": {**MX, **SP, "dp": 1, "ep": 2, "family": "deepseek", **AGAIN},
    "whole, zero3": {**WHOLE, "dp": 2, "zero": 3, "plain_layers": (0, 3)},
}
OFTEN = ["fp4, tp2-sp"]


@pytest.mark.parametrize("name", wide_except(LAYOUTS, OFTEN))
def test_steps_are_the_oracles(name: str, rank_pools: RankPools) -> None:
    cell = make_cell({"cp": 1} | LAYOUTS[name], steps=1 if name in OFTEN else 2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.wide_except("fp4, tp2-uniform")
@pytest.mark.bits
@pytest.mark.parametrize("recompute", ["uniform", "block", "selective"])
@pytest.mark.parametrize("layout", ["mx, experts", "fp4, tp2", "whole, cp2", "whole, activations again"])
def test_recomputed_layers_have_the_same_bits(layout: str, recompute: str, rank_pools: RankPools) -> None:
    cell = make_cell({"cp": 1} | LAYOUTS[layout] | {"recompute": "none"}, dropout=0.1, steps=2, optimizer="adam")
    plain, again = run(rank_pools, [cell, replace(cell, recompute=recompute)])
    assert_same_bits(again, plain, recompute)


@pytest.mark.wide
@pytest.mark.parametrize("layout", ["fp4, tp2-sp", "whole, cp2", "mx, pp2, deferred"])
def test_an_infinity_on_one_rank_skips_the_step_on_all(layout: str, rank_pools: RankPools) -> None:
    cell = make_cell({"cp": 1} | LAYOUTS[layout], steps=2)
    (result,) = run(rank_pools, [replace(cell, infinity_on=1)])
    assert result.skipped == [True, False]


ALIKE: dict[str, tuple[Row, Row]] = {
    "latents, tp2-sp": ({**FP4, "wide": 4, "latents": "blocks", "qk_layernorm": True}, SP),
    "latents, cp2": ({**MX, "latents": "blocks", "qk_layernorm": True, "documents": True}, {"cp": 2}),
    "latents, whole, tp2": ({**WHOLE, "latents": "blocks", "rounds_weight_gradients": True}, {"tp": 2}),
    "recurrent, cp2": ({**MX, "pattern": "MGK-", "rounds_weight_gradients": False}, {"cp": 2}),
    "recurrent, whole, tp2-sp": ({**WHOLE, "pattern": "MGK-", "rounds_weight_gradients": True}, SP),
    "adapters, tp2-sp, deferred": ({**MX, "adapters": "lora"}, {**SP, "pp": 2, "schedule": "zb-h1"}),
    "adapters with dropout, cp2": ({**WHOLE, "adapters": "dropout", "rounds_weight_gradients": True}, {"cp": 2}),
    "adapters of lengths, tp2": ({**FP4, "adapters": "dora"}, {"tp": 2}),
    "adapters with dropout, tp2-sp, deferred": ({**MX, "adapters": "dropout"}, {**SP, "pp": 2, "schedule": "zb-h1"}),
    "adapters, activations again": ({**MX, "adapters": "lora", **AGAIN}, {**SP}),
    "adapters of experts, tp2-sp": ({**FP4, "adapters": "lora", "family": "mixtral"}, SP),
    "depths, tp2-sp, pp2": ({**MX, "depths": 2, "plain_layers": (3,)}, {**SP, "pp": 2}),
    "depths, fp4, cp2": ({**FP4, "depths": 1}, {"cp": 2}),
}
"""Training that the oracle with tables does not compute, and another layout that it must be the same on."""


@pytest.mark.parametrize("name", wide_except(ALIKE, ["latents, cp2"]))
def test_layouts_train_as_one_process(name: str, rank_pools: RankPools) -> None:
    row, layout = ALIKE[name]
    cell = make_cell({"cp": 1, "tp": 1, "dp": 1} | row, steps=2)
    (alone,) = run(rank_pools, [cell])
    (result,) = run(rank_pools, [replace(cell, **layout)])
    assert result.losses == pytest.approx(alone.losses, rel=1e-10)
    for tensors, expected in ((result.gradients, alone.gradients), (result.final, alone.final)):
        for name, values in expected.items():
            assert_gradient_close(tensors[name], values, alone.gradient_norms[0], name)


@pytest.mark.wide
@pytest.mark.parametrize("layout", ["mx, tp2-sp", "whole", "mx, experts", "squares, activations again"])
def test_compiled_layers_train_alike(layout: str, rank_pools: RankPools) -> None:
    cell = make_cell({"cp": 1} | LAYOUTS[layout], steps=2, compiled="aot_eager")
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.wide
@pytest.mark.bits
@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_layers_with_adapters_on_their_second_matrix_leave_stored_codes_aside(
    family: str, rank_pools: RankPools
) -> None:
    cell = make_cell({**MX, "dp": 1, "cp": 1, "adapters": "lora", "family": family}, steps=2)
    aside, plain = run(rank_pools, [replace(cell, stores_activations=True), cell])
    assert_same_bits(aside, plain, family)


AGAIN_ROUNDED: Row = {**WHOLE, "dp": 1, "cp": 2, "rounds_weight_gradients": True, **AGAIN}
TOGETHER: dict[str, Row] = {
    "dense": {**AGAIN_ROUNDED, "recompute": "block"},
    "gradients of values": AGAIN_ROUNDED | {"rounds_weight_gradients": False},
    "adapters": {**AGAIN_ROUNDED, "adapters": "lora"},
    "shared experts": {**AGAIN_ROUNDED, "family": "deepseek", "recompute": "experts"},
    "depths": {**AGAIN_ROUNDED, "depths": 2, "recompute": "uniform"},
    "depths with experts": {**AGAIN_ROUNDED, "family": "mixtral", "depths": 1, "recompute": "experts"},
}


@pytest.mark.wide
@pytest.mark.parametrize("name", TOGETHER)
def test_what_ranks_do_together_for_scales_is_declared(name: str, rank_pools: RankPools) -> None:
    for rank in rank_pools(2).run(collectives_called, make_cell(TOGETHER[name])):
        for called, declared in rank:
            assert called == declared > 0


LOADS: dict[str, tuple[Row, Row]] = {
    "fp4: tp2 to zero3": ({**FP4, "dp": 1, "tp": 2}, {**FP4, "dp": 2, "zero": 3}),
    "mx: the same": ({**MX, **SP, "dp": 1}, {**MX, **SP, "dp": 1}),
    "tensorwise: cp2 to pp2": ({**WHOLE, "cp": 2, "dp": 1}, {**WHOLE, "pp": 2, "dp": 1}),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", LOADS)
def test_a_checkpoint_goes_on_under_another_layout(name: str, rank_pools: RankPools, tmp_path: Path) -> None:
    saving, loading = (make_cell({"cp": 1} | row, optimizer="adam", samples=4) for row in LOADS[name])
    check(rank_pools, [Pair(saving, loading)], tmp_path)

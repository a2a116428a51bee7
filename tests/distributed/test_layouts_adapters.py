"""Adapters on layouts that split the network in every way: steps against the oracle, and bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.layout_cell import make_cell
from tests.distributed.layout_expected import assert_as_expected, run, run_each
from tests.harness.close import assert_gradient_close
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

SP = {"tp": 2, "sequence_parallel": True}
LORA: Row = {"adapters": "lora", "family": "llama"}
TABLES: Row = {"adapters": "tables", "family": "llama", "tied": False}
LAYOUTS: dict[str, Row] = {
    "alone": {**LORA, "dp": 1, "micro_batch_size": 2},
    "alone, gpt2, some": {"adapters": "some", "family": "gpt2", "dp": 1, "documents": True},
    "alone, rslora": {**LORA, "adapters": "rslora", "dp": 1},
    "alone, dora": {**LORA, "adapters": "dora", "dp": 1},
    "tp2": {**LORA, "dp": 1, "tp": 2, "key_values": "uneven6"},
    "tp2-sp, gpt2": {**LORA, "family": "gpt2", "dp": 1, **SP, "key_values": "gqa"},
    "tp4-sp, shared groups, dora": {**LORA, "adapters": "dora", "dp": 1, **SP, "tp": 4, "key_values": "few"},
    "tp2, dora": {**LORA, "adapters": "dora", "dp": 1, "tp": 2, "key_values": "uneven6", "family": "gpt2"},
    "pp2, some": {**LORA, "adapters": "some", "dp": 1, "pp": 2, "recompute": "uniform"},
    "pp4 interleaved": {**LORA, "dp": 1, "pp": 4, "schedule": "interleaved-2", "recompute": "selective"},
    "zb-v, tp2-sp": {**LORA, "dp": 1, "pp": 2, **SP, "schedule": "zb-v"},
    "zb-h1, tp2-sp, gates": {**LORA, "dp": 1, "pp": 2, **SP, "schedule": "zb-h1", "output_gate": True},
    "zero1, gathers": {**LORA, "dp": 2, "zero": 1, "overlap": "reduce and gather", "tp": 2},
    "zero2": {**LORA, "dp": 3, "zero": 2},
    "zero3, tp2-sp, dora, parts": {
        **LORA,
        "adapters": "dora",
        "dp": 2,
        "zero": 3,
        **SP,
        "overlap": "reduce and gather",
        "mlp_parts": 3,
    },
    "cp2-tp2-sp": {**LORA, "dp": 1, "cp": 2, **SP, "documents": True},
    "parts of the sequence": {**LORA, "dp": 1, **SP, "mlp_parts": 3, "family": "gemma"},
    "parts of the sequence, dora, tp2": {**LORA, "adapters": "dora", "dp": 1, "tp": 2, "mlp_parts": 3},
    "experts, ep2": {**LORA, "dp": 2, "ep": 2, "zero": 1, "family": "mixtral"},
    "experts, some, etp2": {"adapters": "some", "dp": 2, **SP, "etp": 2, "family": "mixtral", "key_values": "gqa"},
    "shared experts, zero3": {**LORA, "dp": 2, "zero": 3, "ep": 2, "family": "s-base"},
    "latent attention": {**LORA, "latents": "narrow values", "qk_layernorm": True, "dp": 1, **SP},
    "latent attention, dora": {
        **LORA,
        "adapters": "dora",
        "latents": "wide values",
        "dp": 1,
        **SP,
        "output_gate": True,
    },
    "latents that travel": {**LORA, "latents": "narrow values", "dp": 1, "cp": 2, "tp": 2},
    "latents that travel, dora": {**LORA, "adapters": "dora", "latents": "few", "dp": 1, "cp": 2},
    "sparse attention": {**LORA, "latents": "narrow values", "indexing": "without loss", "dp": 2, "tp": 2},
    "recurrent layers": {**LORA, "pattern": "MGKL*-", "dp": 1, **SP},
    "recurrent layers, dora, shared groups": {
        **LORA,
        "adapters": "dora",
        "pattern": "MGKL",
        "recurrent": "shared",
        "dp": 1,
        "tp": 4,
    },
    "depths": {**LORA, "dp": 1, **SP, "depths": 2},
    "a repeated depth, pp2": {**LORA, "dp": 1, "pp": 2, "depths": 2, "repeated": True},
    "tables, zb-h1, zero1, tp2-sp": {
        **TABLES,
        "pp": 2,
        "dp": 2,
        "zero": 1,
        "schedule": "zb-h1",
        **SP,
        "fused_loss": True,
    },
    "tables, tp2": {**TABLES, "dp": 1, "tp": 2, "vocabulary": "odd", "documents": True},
    "tables, tp4-sp, padding alone": {**TABLES, "dp": 1, **SP, "tp": 4, "vocabulary": "empty", "fused_loss": True},
    "tables, zero3, gpt2": {
        **TABLES,
        "dp": 2,
        "zero": 3,
        "tp": 2,
        "family": "gpt2",
        "overlap": "reduce and gather",
        "vocabulary": "odd",
    },
    "tables, scaled embeddings": {**TABLES, "dp": 1, **SP, "family": "gemma", "recompute": "uniform"},
    "tables, dora, tp2-sp": {**TABLES, "adapters": "tables, dora", "dp": 1, **SP, "vocabulary": "odd"},
    "tables, dora, cp2-tp2": {**TABLES, "adapters": "tables, dora", "dp": 1, "cp": 2, "tp": 2, "vocabulary": "empty"},
    "output layer, dora, cp2-tp2": {**TABLES, "adapters": "head, dora", "dp": 1, "cp": 2, "tp": 2, "vocabulary": "odd"},
    "output layer, depths": {**TABLES, "adapters": "head, dora", "dp": 1, **SP, "depths": 2},
}
OFTEN = [
    "tables, zb-h1, zero1, tp2-sp",
    "alone, gpt2, some",
    "zero3, tp2-sp, dora, parts",
]


@pytest.mark.parametrize("name", wide_except(LAYOUTS, OFTEN))
def test_steps_are_the_oracles(name: str, rank_pools: RankPools) -> None:
    cell = make_cell({"cp": 1, "pp": 1} | LAYOUTS[name], steps=2, optimizer="adam", clip_grad=0.5)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


DROPPED: Row = {"adapters": "dropout", "family": "llama", "dp": 1, "dropout": 0.1}
DROPOUT: dict[str, Row] = {
    "tp2-sp": {**DROPPED, **SP, "recompute": "uniform"},
    "tp2-pp2": {**DROPPED, "tp": 2, "pp": 2, "family": "gpt2"},
    "cp2-tp2-sp": {**DROPPED, "cp": 2, **SP, "micro_batch_size": 2},
    "latents": {**DROPPED, **SP, "latents": "narrow values"},
    "recurrent layers": {**DROPPED, **SP, "pattern": "MGKL*-"},
    "depths": {**DROPPED, **SP, "depths": 2, "repeated": True},
}


@pytest.mark.parametrize("name", wide_except(DROPOUT, ["cp2-tp2-sp"]))
def test_the_same_elements_are_dropped_on_every_layout(name: str, rank_pools: RankPools) -> None:
    cell = make_cell({"cp": 1, "pp": 1} | DROPOUT[name])
    alone, plain = cell.alone(), replace(cell.alone(), adapters="lora")
    result, expected, without = run_each(rank_pools, [cell, alone, plain])
    assert abs(result.losses[0] - expected.losses[0]) <= 1e-10 < abs(expected.losses[0] - without.losses[0])
    for tensor, gradient in expected.gradients.items():
        assert_gradient_close(result.gradients[tensor], gradient, expected.gradient_norms[0], tensor)

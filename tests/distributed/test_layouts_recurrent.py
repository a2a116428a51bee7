"""Layers with states or short convolutions on layouts that split the network in every way.

They are Mamba-2 (M), the gated delta net (G), Kimi delta attention (K) and the short convolution (L). Samples have 24
tokens, chunks of the recurrences 5 and 4, and their grid begins with the sample: cuts of context parallelism lie on it
and off it, and at 4 ranks a cut is shorter than the convolution. With `documents`, one begins at every fourth token on
average.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.layout_cell import make_cell
from tests.distributed.layout_expected import assert_as_expected, assert_same_bits, run
from tests.distributed.test_checkpoint_layouts import Pair, check
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, Row] = {
    "M alone": {"pattern": "M", "dp": 1},
    "G alone": {"pattern": "G", "dp": 1, "documents": True, "micro_batch_size": 2},
    "one head": {"pattern": "GM-", "dp": 1, "recurrent": "plain", "recompute": "uniform"},
    "other norms": {"pattern": "MG*-", "dp": 1, "family": "gemma", "recurrent": "wide", "documents": True},
    "tp2": {"pattern": "MG*", "dp": 1, "tp": 2, "documents": True, "recompute": "selective"},
    "tp2-sp": {"pattern": "GM-", "dp": 1, **SP, "recurrent": "wide", "documents": True},
    "tp4-sp, a head a rank": {"pattern": "MG", "dp": 1, "tp": 4, "sequence_parallel": True, "recompute": "block"},
    "tp2, groups shared": {"pattern": "GM*", "dp": 1, "tp": 2, "recurrent": "shared", "documents": True},
    "tp4-sp, groups shared, heads of no attention": {
        "pattern": "MG",
        "dp": 1,
        "tp": 4,
        "sequence_parallel": True,
        "recurrent": "shared",
        "key_values": "uneven6",
    },
    "zero3-tp2-sp, groups shared": {"pattern": "MG-", "dp": 2, **SP, "zero": 3, "recurrent": "shared"},
    "cp2": {"pattern": "GM*-", "dp": 1, "cp": 2, "documents": True, "family": "llama"},
    "cp2, one document": {"pattern": "MG", "dp": 1, "cp": 2, "recompute": "uniform", "micro_batch_size": 2},
    "cp2, dealt": {"pattern": "MG*", "dp": 1, "cp": 2, "chunks": 4, "documents": True},
    "cp2, chain": {"pattern": "GMK", "dp": 1, "cp": 2, "documents": True, "chains": True},
    "cp3, chain, selective": {"pattern": "G*MK", "dp": 1, "cp": 3, "chains": True, "recompute": "selective"},
    "cp4-pp2, chain": {"pattern": "GM|K", "dp": 1, "cp": 4, "pp": 2, "documents": True, "chains": True},
    "cp3": {"pattern": "G*M", "dp": 1, "cp": 3, "documents": True, "recurrent": "wide"},
    "cp4": {"pattern": "MG", "dp": 1, "cp": 4, "documents": True},
    "cp2-tp2-sp": {"pattern": "M*G-", "dp": 1, "cp": 2, **SP, "documents": True},
    "pp2": {"pattern": "M|G*-", "dp": 1, "pp": 2, "documents": True},
    "pp2-cp2": {"pattern": "MG|-M", "dp": 1, "pp": 2, "cp": 2, "documents": True, "recompute": "block"},
    "pp2 in a v": {"pattern": "M|G*|-G|", "dp": 1, "pp": 2, "schedule": "zb-v", "tied": False, "documents": True},
    "pp2 interleaved": {"pattern": "M|*-|GM|-", "dp": 1, "pp": 2, "schedule": "interleaved-2"},
    "zero1": {"pattern": "GM-", "dp": 2, "zero": 1, "documents": True},
    "zero2": {"pattern": "GM-", "dp": 2, "zero": 2, "recurrent": "wide"},
    "zero3": {"pattern": "MG*-", "dp": 2, "zero": 3, "overlap": "reduce and gather", "documents": True},
    "zero3-tp2-cp2": {"pattern": "GM*", "dp": 2, "zero": 3, "tp": 2, "cp": 2, "documents": True},
    "L alone": {"pattern": "L", "dp": 1, "documents": True, "micro_batch_size": 2},
    "L, tp2-sp, biases": {
        "pattern": "L-L",
        "dp": 1,
        **SP,
        "recurrent": "wide",
        "documents": True,
        "recompute": "block",
    },
    "L, cp2-tp2": {"pattern": "L*-", "dp": 1, "cp": 2, "tp": 2, "documents": True, "family": "llama"},
    "L, cp4, biases": {"pattern": "L-", "dp": 1, "cp": 4, "recurrent": "wide", "documents": True},
    "L, zero3, pp2, other norms": {"pattern": "L|L*-", "dp": 2, "pp": 2, "zero": 3, "family": "gemma"},
    "L, one tap, cp2": {"pattern": "LG", "dp": 1, "cp": 2, "recurrent": "plain", "recompute": "uniform"},
    "K alone": {"pattern": "K", "dp": 1, "documents": True, "micro_batch_size": 2},
    "K, one head": {"pattern": "K-", "dp": 1, "recurrent": "plain", "recompute": "uniform", "documents": True},
    "K, bounded, other norms": {"pattern": "KG*-", "dp": 1, "family": "gemma", "recurrent": "wide"},
    "K, tp2": {"pattern": "K*K", "dp": 1, "tp": 2, "documents": True, "recompute": "selective"},
    "K, tp2-sp": {"pattern": "K-", "dp": 1, **SP, "documents": True, "recompute": "block"},
    "K, tp4-sp, a head a rank": {"pattern": "KL", "dp": 1, **SP, "tp": 4, "recurrent": "wide"},
    "K, cp2, dealt": {"pattern": "K*-", "dp": 1, "cp": 2, "chunks": 4, "documents": True, "family": "llama"},
    "K, cp3": {"pattern": "KM", "dp": 1, "cp": 3, "documents": True, "recurrent": "wide"},
    "K, cp4": {"pattern": "KK", "dp": 1, "cp": 4, "documents": True},
    "K, cp2-tp2-sp": {"pattern": "K-", "dp": 1, "cp": 2, **SP, "documents": True},
    "K, pp2 in a v": {"pattern": "K|L*|-K|", "dp": 1, "pp": 2, "schedule": "zb-v", "tied": False, "documents": True},
    "K, pp2 in a v, tp2-sp": {"pattern": "K|K||-", "dp": 1, "pp": 2, **SP, "schedule": "zb-v", "tied": False},
    "K, zero3-tp2-cp2": {"pattern": "KLK", "dp": 2, "zero": 3, "tp": 2, "cp": 2, "documents": True},
    "K, zero1, tp2-sp": {"pattern": "K", "dp": 2, "zero": 1, **SP, "overlap": "reduce and gather"},
    "experts": {"pattern": "MEG-*E", "dp": 2, "ep": 2, "zero": 1, "family": "mixtral", "documents": True},
    "experts, cp2, pp2": {"pattern": "GE*|ME", "dp": 1, "cp": 2, "pp": 2, "ep": 2, "family": "deepseek"},
    "latent experts, tp2-sp, pp2": {"pattern": "ME*|E-", "dp": 1, **SP, "pp": 2, "ep": 2, "family": "nemotron"},
}
OFTEN = [
    "cp2, chain",
    "tp4-sp, groups shared, heads of no attention",
    "L, tp2-sp, biases",
    "L, cp4, biases",
]
LOADS: dict[str, tuple[Row, Row]] = {
    "tp2 to pp2": ({"dp": 1, "tp": 2, "pattern": "MG*-"}, {"dp": 1, "pp": 2, "pattern": "MG|*-"}),
    "zero3 to cp2": ({"dp": 2, "zero": 3, "pattern": "GM-"}, {"dp": 1, "cp": 2, "pattern": "GM-"}),
}


@pytest.mark.parametrize("name", wide_except(LAYOUTS, OFTEN))
def test_steps_are_the_oracles(name: str, rank_pools: RankPools) -> None:
    cell = make_cell({"cp": 1} | LAYOUTS[name], dropout=0.1 * (list(LAYOUTS).index(name) % 2), steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.parametrize("pattern", wide_except(["MG", "KL"], []))
def test_matrices_of_layers_are_those_of_muon(pattern: str, rank_pools: RankPools) -> None:
    cell = make_cell({"cp": 1, "pattern": pattern, "dp": 2, "zero": 1, **SP}, optimizer="muon", steps=2)
    cells = [cell, replace(cell, per_head=True)]
    for each, result in zip(cells, run(rank_pools, cells), strict=True):
        assert_as_expected(each, result)


@pytest.mark.wide
@pytest.mark.parametrize("name", LOADS)
def test_a_checkpoint_goes_on_under_another_layout(name: str, rank_pools: RankPools, tmp_path: Path) -> None:
    saving, loading = (make_cell({"cp": 1} | row, optimizer="adam", samples=4) for row in LOADS[name])
    check(rank_pools, [Pair(saving, loading)], tmp_path)


@pytest.mark.wide_except("selective-2")
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("recompute", ["uniform", "block", "selective"])
def test_recomputed_layers_have_the_same_bits(recompute: str, cp: int, rank_pools: RankPools) -> None:
    """Selective recomputation leaves the recurrence as it was, and computes again what stands around it."""
    cell = make_cell({"cp": cp, "pattern": "MG*-", "dp": 1, "documents": True}, dropout=0.1, steps=2, optimizer="adam")
    plain, again = run(rank_pools, [cell, replace(cell, recompute=recompute)])
    assert_same_bits(again, plain, recompute)

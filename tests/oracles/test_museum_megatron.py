"""Bugs that megatron-core has as it is: the museum's runs of them, beside runs that are mended and runs of one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from museum.entries import FOLDER, read_entry
from museum.megatron import make_case
from tests.harness.rank_pool import RankPools

pytestmark = pytest.mark.oracle

NAMES = (
    "delta_net_norm_not_summed",
    "gathered_logits_as_a_shard",
    "masked_token_count_overwritten",
    "query_latent_norm_doubled",
    "rotated_key_of_own_heads",
    "sinks_outside_the_norm",
)
ROUNDING = 2e-6
"""Relative, of norms in fp32: ten times what other orders of summation change; the smallest bug changes 1.6e-5."""


@pytest.mark.parametrize("name", NAMES)
def test_norms_are_wrong_until_the_program_is_mended(name: str, rank_pools: RankPools, tmp_path: Path) -> None:
    folder = FOLDER / f"megatron_{name}"
    assert read_entry(folder).is_real
    norms = {}
    for wrong in (True, False):
        case = tmp_path / str(wrong)
        make_case(folder / "bug.py", case, wrong, rank_pools)
        for run in ("run", "reference"):
            norms[wrong, run] = json.loads((case / run / "metrics.jsonl").read_text())["grad_norm"]
    alone = norms[False, "reference"]
    assert norms[False, "run"] == pytest.approx(alone, rel=ROUNDING)
    assert norms[True, "run"] != pytest.approx(alone, rel=ROUNDING)

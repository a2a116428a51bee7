"""Megatron-LM's checkpoints of patterns, in and out: against megatron-core's HybridModel itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config import ModelConfig
from megalite.conversion.megatron import open_megatron
from megalite.conversion.megatron_arguments import arguments_of
from megalite.conversion.verification import logits
from tests.harness import megatron_hybrid
from tests.harness.rank_pool import RankPools
from tests.unit.test_conversion_megatron import TOKENS, close, random_model, read, write
from tests.unit.test_conversion_megatron_hybrid import YARN, pattern

pytestmark = pytest.mark.oracle

ONE_RANK, TWO_RANKS = ("*-", "*E", "M*-", "G*-", "MG*-E", "+-", "M+-+"), ("*-", "M*-", "G*-", "+-")
"""Patterns; megatron-core has experts on two ranks only with sequence parallelism, for which it needs a GPU."""
LATENTS: dict[str, dict[str, Any]] = {
    "of the input": {"q_lora_rank": None, "qk_layernorm": False},
    "yarn": YARN | {"yarn_original_max_position_embeddings": 4096},
    "wide values, a table": {"v_head_dim": 12, "position_embedding_type": "learned_absolute"},
}
MODELS = {
    **{letters: pattern(letters) for letters in ONE_RANK},
    **{f"+-, {name}": replace(pattern("+-"), **options) for name, options in LATENTS.items()},
}
CASES = [*((name, 1) for name in MODELS), *((name, 2) for name in (*TWO_RANKS, "+-, of the input"))]


def arguments(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of a run with the network's flags."""
    return vars(arguments_of(model, {}, 32, 56)) | {"lr": 1e-3}


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_what_megatron_core_saves_is_read(name: str, ranks: int, rank_pools: RankPools, tmp_path: Path) -> None:
    model = MODELS[name]
    form: megatron_hybrid.Form = "per layer" if ranks == 1 else "own norms"
    expected = rank_pools(ranks).run(megatron_hybrid.save, model, arguments(model), tmp_path, TOKENS, ranks, form)[0]
    close(logits(open_megatron(tmp_path), TOKENS), expected[..., :53])


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_megatron_core_loads_what_is_written(name: str, ranks: int, rank_pools: RankPools, tmp_path: Path) -> None:
    opened = random_model(MODELS[name])
    folder = write(opened, tmp_path, tensor_parallel_size=ranks)
    found, _ = rank_pools(ranks).run(megatron_hybrid.load, opened.config, folder, TOKENS, ranks)[0]
    close(logits(opened, TOKENS), found[..., :53])
    again = read(open_megatron(folder))
    assert all(torch.equal(values, again[tensor]) for tensor, values in read(opened).items())

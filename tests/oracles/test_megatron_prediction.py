"""Multi-token prediction against megatron-core's HybridModel: its checkpoints, in and out, and each depth's states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.checkpoint import load_weights
from megalite.config import ModelConfig
from megalite.conversion.megatron import open_megatron
from megalite.conversion.opened import OpenedModel
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.training.batches import further_tokens
from tests.harness import megatron_hybrid
from tests.harness.rank_pool import RankPools
from tests.oracles.test_megatron_hybrid import arguments
from tests.unit.test_conversion_megatron import TOKENS, close, random_model, write
from tests.unit.test_conversion_megatron_hybrid import pattern

pytestmark = pytest.mark.oracle

CASES: list[tuple[str, str, dict[str, Any], int]] = [
    ("*-", "*-", {}, 1),
    ("M*-", "*M", {}, 1),
    ("*E", "*E", {"mtp_use_repeated_layer": True}, 1),
    ("G*-", "-*", {}, 2),
    ("+E", "+E", {"mtp_num_layers": 1}, 1),
    ("+-", "+-", {"mtp_num_layers": 1}, 2),
]


def model_of(letters: str, of_depth: str, options: dict[str, Any]) -> ModelConfig:
    both = pattern(letters + "".join(each for each in of_depth if each not in letters))
    main = replace(both, num_layers=len(letters), hybrid_layer_pattern=letters)
    return replace(main, **{"mtp_num_layers": 2, "mtp_hybrid_override_pattern": of_depth} | options)


@torch.no_grad()
def states(opened: OpenedModel) -> Tensor:
    """Return the hidden states that enter the output layer at each depth, as `megatron_hybrid.depths` does.

    Tokens behind the end of a sample are 0 there.
    """
    network = GPT(opened.config, ParallelMesh()).eval()
    load_weights(opened.source, opened.what, network, None, network.mesh)
    positions, labels = torch.arange(TOKENS.shape[1]).expand_as(TOKENS), torch.zeros_like(TOKENS)
    batch = MicroBatch(TOKENS, positions, None, None, None, RandomKey(0, ()))
    read, _, _ = further_tokens(TOKENS, labels, torch.ones_like(TOKENS), None, opened.config.depths)
    assert network.head is not None
    assert network.prediction is not None
    normed = network.head.norm(network.hidden_states(None, batch)[0])
    found, _ = network.prediction.states(normed, read, network._context(batch, None), network.recomputed)
    return torch.stack([normed, *found])


@pytest.mark.parametrize(("letters", "of_depth", "options", "ranks"), CASES)
def test_depths_are_those_of_megatron_core(
    letters: str, of_depth: str, options: dict[str, Any], ranks: int, rank_pools: RankPools, tmp_path: Path
) -> None:
    opened = random_model(model_of(letters, of_depth, options))
    folder = write(opened, tmp_path, tensor_parallel_size=ranks)
    close(states(opened), rank_pools(ranks).run(megatron_hybrid.depths, opened.config, folder, TOKENS, ranks)[0])


@pytest.mark.parametrize(("letters", "of_depth", "options", "ranks"), CASES)
def test_what_megatron_core_saves_is_read(
    letters: str, of_depth: str, options: dict[str, Any], ranks: int, rank_pools: RankPools, tmp_path: Path
) -> None:
    model = model_of(letters, of_depth, options)
    expected = rank_pools(ranks).run(megatron_hybrid.depths, model, tmp_path, TOKENS, ranks, arguments(model))[0]
    again = open_megatron(tmp_path)
    assert again.config.depths == model.depths
    close(states(again), expected)

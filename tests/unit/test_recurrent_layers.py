"""Recurrent layers on one process: what is kept in fp32, and what their initial values are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.recurrent_layers import KINDS, distances
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter, named_pieces
from megalite.parallel.randomness import RandomKey
from tests.initial_weights import Network

IN_FP32 = ("A_log", "dt_bias", "D")


def network(dtype: torch.dtype) -> GPT:
    options: dict[str, Any] = {
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "mamba_num_groups": 2,
        "mamba_state_dim": 6,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 8,
        "kda_num_heads": 4,
        "kda_head_dim": 6,
        "short_conv_bias": True,
    }
    config = ModelConfig(
        6, 16, 4, vocab_size=30, hybrid_layer_pattern="MG-KLK", position_embedding_type="none", **options
    )
    model = GPT(config, ParallelMesh(), dtype=dtype)
    initialize(model, 3)
    return model


def named(model: GPT) -> dict[str, Parameter]:
    return {piece.tensor.name: parameter for parameter, piece in named_pieces(model)}


def test_initial_weights_are_those_of_the_rule() -> None:
    model = network(torch.float64)
    sizes: dict[str, Any] = {"mamba": (4, 2, 8, 6, 4), "delta": (2, 4, 6, 8, 4)}
    sizes |= {"kimi": (4, 6, 4, None), "convolution": (3, True)}
    expected = Network(6, 16, 4, 4, 4, 64, 30, 0.02, pattern="MG-KLK", **sizes).weights(3, torch.float64)
    assert set(named(model)) == set(expected)
    for parameter, piece in named_pieces(model):
        if piece.tensor.name != "embedding.word":  # padded
            assert torch.equal(piece.view(parameter.detach()), expected[piece.tensor.name]), piece.tensor.name
    bias = named(model)["layers.0.mamba.dt_bias"]
    steps = torch.nn.functional.softplus(bias.detach())
    assert 1e-3 <= steps.min() <= steps.max() <= 1e-1


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16])
def test_decays_are_kept_in_fp32(gradients: torch.dtype) -> None:
    """One rounded to bf16 is off by up to 0.8 %, and a step of the learning rate would not change it."""
    model = network(torch.bfloat16)
    optimizer = make_optimizer(
        [model], ParallelMesh(), OptimizerConfig(lr=1e-3), DataParallel(gradients), blocks=[model.blocks()]
    )
    for name, parameter in named(model).items():
        wide = name.split(".")[-1] in IN_FP32
        assert parameter.dtype == (torch.float32 if wide else torch.bfloat16), name
    for bucket in optimizer.buckets:
        wide = bucket.parameters.dtype == torch.float32
        assert bucket.gradients.dtype == (torch.float32 if wide else gradients)
    before = {name: named(model)[name].detach().clone() for name in named(model) if name.endswith(IN_FP32)}
    optimizer.begin_step(1)
    tokens = torch.arange(24).view(1, 24) % 30

    batch = MicroBatch(tokens, torch.arange(24)[None], None, tokens, torch.ones(1, 24), RandomKey(1, (0,)))
    next(iter(model({}, batch).terms.values())).backward()
    optimizer.reduce(0, 1)
    optimizer.step(Rates(1e-4, 1e-4, 0.5))
    for name, old in before.items():
        change = named(model)[name].detach() - old
        assert 0.0 < change.abs().max() <= 1.01e-4, name  # Adam's first step, and no weight decay


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_no_farther_from_float64_than_transformers(kind: str) -> None:
    """Over 4,096 tokens. The factor is for chance: both differ by roundings of inputs to bf16."""
    found = distances(kind)
    for what in ("output", "input gradient"):
        assert found[f"{what}, own"] <= 1.05 * found[f"{what}, transformers"] < math.inf

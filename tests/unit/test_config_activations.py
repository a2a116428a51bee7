"""Table of activations: the flags that choose each, its function, and its names in other programs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch.nn.functional as F
import transformers.activations
from torch import Tensor, randn

from megalite.config import ModelConfig
from megalite.config.activations import ACTIVATIONS, FLAGS, Activation, flags_by_megatron, megatron_of
from megalite.config.validate_model import model_problems
from megalite_kernels.activation import FUNCTIONS

MODEL = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, max_position_embeddings=8)
every_row = pytest.mark.parametrize("row", ACTIVATIONS, ids=lambda row: row.name)


def test_flags_choose_one_activation_or_are_refused() -> None:
    rows = {row.flags: row for row in ACTIVATIONS}
    for values in itertools.product((False, True), repeat=len(FLAGS)):
        model = replace(MODEL, **dict(zip(FLAGS, values, strict=True)))
        on = frozenset(flag for flag in FLAGS if getattr(model, flag))
        refused = any("are different activations" in problem for problem in model_problems(model))
        assert refused == (on not in rows)
        assert refused or model.activation is rows[on]


@every_row
def test_its_function_is_the_one_that_its_names_have_in_transformers(row: Activation) -> None:
    values = randn(5, 8).double()
    gate, up = values.chunk(2, dim=-1) if row.gated else (values, None)
    for name in row.hugging_face:
        function = F.silu if name == "swish" else transformers.activations.ACT2FN[name]
        expected: Tensor = function(gate) if up is None else function(gate) * up
        assert (FUNCTIONS[row.name](values) - expected).abs().max() < 1e-6  # gelu_accurate rounds a constant


@every_row
def test_megatrons_arguments_choose_it_where_it_has_such(row: Activation) -> None:
    """Otherwise they choose another one; the caller detects that it differs."""
    found = flags_by_megatron(megatron_of(row), biases=True)
    there = {flag for flag, value in found.items() if value}
    assert (there == row.flags) == (row.name not in ("geglu", "exact_geglu"))
    assert flags_by_megatron({"openai_gelu": True}, biases=False) == {"exact_gelu": False}
    assert flags_by_megatron({}, biases=False) == {"exact_gelu": True}


def test_every_function_has_a_row() -> None:
    assert FUNCTIONS.keys() == {row.name for row in ACTIVATIONS}

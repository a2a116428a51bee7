"""Messages at the start of a run about effects of its layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.config.model import ModelConfig
from megalite.training.summary import masks_of_an_operator

MODEL = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=4, attention_dropout=0.1)
GPU, CPU = torch.device("cuda"), torch.device("cpu")


def test_an_operator_that_draws_its_own_masks_is_named() -> None:
    (line,) = masks_of_an_operator(MODEL, GPU, torch.bfloat16).values()
    assert "scaled_dot_product_attention" in str(line)


@pytest.mark.parametrize(
    ("model", "device", "dtype"),
    [
        (replace(MODEL, attention_dropout=0.0), GPU, torch.bfloat16),
        (MODEL, CPU, torch.bfloat16),
        (MODEL, GPU, torch.float64),
        (replace(MODEL, attn_logit_softcapping=2.0), GPU, torch.float32),
    ],
    ids=["without dropout", "on a CPU", "float64", "capped scores"],
)
def test_what_follows_the_rule_is_not(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    assert masks_of_an_operator(model, device, dtype) == {}

"""Megatron-LM's checkpoints of networks with depths, in and out, by its names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megalite.checkpoint.compatibility import function_of
from megalite.config import ModelConfig
from megalite.conversion.megatron import open_megatron
from megalite.conversion.megatron_arguments import arguments_of
from megalite.conversion.megatron_layers import layers_in
from megalite.conversion.megatron_names import canonical
from tests.unit.test_conversion_megatron import random_model, read, write
from tests.unit.test_conversion_megatron_hybrid import PLAIN, pattern

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it says so even where that is asked

EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 16}


def with_depths(model: ModelConfig, letters: str | None = None, **options: Any) -> ModelConfig:
    return replace(model, mtp_num_layers=2, mtp_hybrid_override_pattern=letters, **options)


MODELS = {
    "gpt": with_depths(PLAIN),
    "repeated": with_depths(PLAIN, mtp_use_repeated_layer=True),
    "experts at the end": with_depths(PLAIN, moe_layer_freq="[0,0,1]", **EXPERTS),
    "experts before the end": with_depths(PLAIN, moe_layer_freq="[1,1,0]", **EXPERTS),
    "pattern": with_depths(pattern("M*-G"), "*-M"),
    "pattern, repeated": with_depths(pattern("*E"), "*E", mtp_use_repeated_layer=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_depths_are_read_as_they_were_written(name: str, tmp_path: Path) -> None:
    opened = random_model(MODELS[name])
    write(opened, tmp_path)
    again = open_megatron(tmp_path)
    assert function_of(again.config) == function_of(opened.config)
    assert again.config.mtp_loss_scaling_factor == opened.config.mtp_loss_scaling_factor
    weights = read(opened)
    for tensor, values in read(again).items():
        assert torch.equal(values, weights.pop(tensor)), tensor
    assert not weights


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: tuple(kind.size) for key, kind in found.items()}


def test_a_gpts_depths_have_megatrons_names(tmp_path: Path) -> None:
    """The layers of the network are stacked, those of depths are not; experts have a norm of their own."""
    found = shapes(write(random_model(MODELS["gpt"]), tmp_path / "gpt"))
    assert found["mtp.layers.0.enorm.weight"] == found["mtp.layers.1.hnorm.weight"] == (24,)
    assert found["mtp.layers.1.eh_proj.weight"] == (24, 48)
    assert found["mtp.layers.1.final_layernorm.weight"] == (24,)
    assert found["mtp.layers.0.transformer_layer.mlp.linear_fc1.layer_norm_weight"] == (24,)
    assert len(found["decoder.layers.mlp.linear_fc1.weight"]) == 3
    found = shapes(write(random_model(MODELS["experts at the end"]), tmp_path / "experts"))
    assert "mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight" in found
    name = "mtp.layers.0.transformer_layer.input_layernorm.weight"
    assert canonical(name) == "mtp.layers.0.mtp_model_layer.self_attention.linear_qkv.layer_norm_weight"


def test_the_depths_of_a_pattern_have_megatrons_names(tmp_path: Path) -> None:
    found = shapes(write(random_model(MODELS["pattern"]), tmp_path))
    assert found["mtp.layers.1.mtp_model_layer.layers.2.mixer.in_proj.layer_norm_weight"] == (24,)
    assert "mtp.layers.0.mtp_model_layer.layers.0.self_attention.linear_qkv.weight" in found
    assert found["mtp.layers.0.final_layernorm.weight"] == (24,)
    assert not any("layers.0.final_norm" in name for name in found)


def test_halves_of_the_projection_are_the_embedding_and_the_hidden_state(tmp_path: Path) -> None:
    opened = random_model(MODELS["gpt"])
    folder = write(opened, tmp_path)
    state = {"mtp.layers.1.eh_proj.weight": torch.zeros(24, 48)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["mtp.layers.1.eh_proj.weight"], read(opened)["mtp.1.projection"].flatten(1))


def test_the_pattern_of_the_arguments_has_the_depths() -> None:
    written = vars(arguments_of(MODELS["pattern"], {}, 32, 56))
    assert (written["hybrid_layer_pattern"], written["mtp_num_layers"]) == ("M*-G/*-M/*-M", 2)
    assert vars(arguments_of(MODELS["repeated"], {}, 32, 56))["mtp_use_repeated_layer"] is True


def test_layers_that_depths_alone_have_keep_their_sizes() -> None:
    arguments = {"mamba_head_dim": 8, "mamba_num_heads": 2, "hybrid_layer_pattern": "*-"}
    written_apart = {"mtp_num_layers": 1, "mtp_hybrid_override_pattern": "M"}
    found = layers_in({**arguments, **written_apart})
    assert found == {**arguments, **written_apart, "num_layers": 2}

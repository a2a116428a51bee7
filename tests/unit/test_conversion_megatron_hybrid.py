"""Megatron-LM's checkpoints of patterns, in and out, by its names; megatron-core judges them in `tests/oracles`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megalite.checkpoint.compatibility import function_of
from megalite.config import ModelConfig
from megalite.conversion.megatron import open_megatron, write_megatron
from megalite.conversion.megatron_arguments import argument_fates, arguments_of, model_of
from megalite.errors import CheckpointError
from tests.unit.test_conversion_megatron import LLAMA, Weights, random_model, read, write

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it says so even where that is asked

PLAIN = replace(LLAMA, qk_layernorm=False, use_rope_scaling=False)
RECURRENT = {"mamba_head_dim": 8, "mamba_state_dim": 4, "mamba_num_groups": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8}
OPTIONS: dict[str, dict[str, Any]] = {"M": RECURRENT, "G": DELTA, "E": {"num_experts": 4, "moe_ffn_hidden_size": 16}}


def pattern(letters: str) -> ModelConfig:
    options = {name: value for letter, each in OPTIONS.items() if letter in letters for name, value in each.items()}
    return replace(PLAIN, num_layers=len(letters), hybrid_layer_pattern=letters, **options)


@pytest.mark.parametrize(
    ("letters", "options"), [("M*-G", {}), ("*E-*", {}), ("**--", {}), ("*E", {"moe_latent_size": 8})]
)
def test_a_pattern_is_read_as_it_was_written(letters: str, options: dict[str, Any], tmp_path: Path) -> None:
    opened = random_model(replace(pattern(letters), **options))
    write(opened, tmp_path)
    again = open_megatron(tmp_path)
    assert function_of(again.config) == function_of(opened.config)
    weights = read(opened)
    for name, values in read(again).items():
        assert torch.equal(values, weights.pop(name)), name
    assert not weights


def test_linear_attention_in_blocks_is_read_as_it_was_written(tmp_path: Path) -> None:
    """A GPT keeps its layers: both halves have the index of their block."""
    variant = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": "3"}
    opened = random_model(replace(PLAIN, num_layers=3, **variant, **DELTA))
    folder = write(opened, tmp_path)
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert "decoder.layers.1.self_attention.in_proj.layer_norm_weight" in names
    assert "decoder.layers.2.self_attention.linear_qkv.weight" in names
    assert "decoder.final_layernorm.weight" in names
    again, weights = open_megatron(tmp_path), read(opened)
    assert function_of(again.config) == function_of(opened.config)
    assert all(torch.equal(values, weights[name]) for name, values in read(again).items())


@pytest.mark.parametrize(
    ("decays", "dtype"), [(torch.float32, None), (torch.float32, torch.float16), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize(
    ("model", "count"),
    [
        (pattern("M*-G"), 5),
        (replace(PLAIN, experimental_attention_variant="gated_delta_net", linear_attention_freq="3", **DELTA), 4),
    ],
    ids=["pattern", "gpt"],
)
def test_decays_are_written_in_fp32(
    model: ModelConfig, count: int, decays: torch.dtype, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    random = random_model(model)
    precise = {name for name in random.source.tensors if name.endswith(("A_log", "dt_bias", ".D"))}
    values = {name: each.to(decays if name in precise else torch.bfloat16) for name, each in read(random).items()}
    opened = replace(random, source=Weights(values))
    assert opened.dtype == torch.bfloat16
    write_megatron(opened, tmp_path, dtype=dtype, tensor_parallel_size=1, workers=1, advance=lambda _: None)
    again = open_megatron(tmp_path)
    weights = read(again)
    assert len(precise) == count
    assert again.dtype == (dtype or torch.bfloat16)
    kinds = {name: each.dtype for name, each in weights.items()}
    assert kinds == {name: torch.float32 if name in precise else dtype or torch.bfloat16 for name in weights}
    assert all(torch.equal(weights[name], values[name].float()) for name in precise)


def test_layers_have_the_names_of_their_places(tmp_path: Path) -> None:
    """A layer of each letter has its index in its names, and no axis for the layers; parts are apart."""
    folder = write(random_model(pattern("-M*G")), tmp_path)
    found = {
        key: tuple(kind.size) for key, kind in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    }
    assert found["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"] == (24,)
    assert found["decoder.layers.1.mixer.in_proj.layer_norm_weight"] == (24,)
    assert found["decoder.layers.1.mixer.in_proj.weight.z"] == (48, 24)
    assert found["decoder.layers.1.mixer.in_proj.weight.B"] == (8, 24)
    assert found["decoder.layers.1.mixer.conv1d.weight.C"] == (8, 1, 4)
    assert found["decoder.layers.1.mixer.conv1d.bias.x"] == (48,)
    assert found["decoder.layers.2.self_attention.linear_qkv.layer_norm_weight"] == (24,)
    assert found["decoder.layers.3.self_attention.in_proj.layer_norm_weight"] == (24,)
    assert found["decoder.layers.3.self_attention.in_proj.weight.alpha"] == (4, 24)
    assert found["decoder.layers.3.self_attention.conv1d.weight.value"] == (32, 1, 4)
    assert found["decoder.final_norm.weight"] == (24,)


def test_norms_of_their_own_are_the_fused_ones(tmp_path: Path) -> None:
    """Read the names that norms have without Transformer Engine."""
    opened = random_model(pattern("M*-GE"))
    folder = write(opened, tmp_path / "fused")
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    (own := tmp_path / "own").mkdir()
    shutil.copy(folder / "metadata.json", own)
    shutil.copy(folder / "common.pt", own)
    names = {
        "decoder.layers.0.mixer.in_proj.layer_norm_weight": "decoder.layers.0.norm.weight",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.1.input_layernorm.weight",
        "decoder.layers.2.mlp.linear_fc1.layer_norm_weight": "decoder.layers.2.pre_mlp_layernorm.weight",
        "decoder.layers.3.self_attention.in_proj.layer_norm_weight": "decoder.layers.3.input_layernorm.weight",
    }
    state = torch.load(tmp_path / "all.pt")
    assert names.keys() <= state.keys()
    dcp.save({names.get(key, key): values for key, values in state.items()}, checkpoint_id=own, no_dist=True)
    weights = read(opened)
    for name, values in read(open_megatron(own)).items():
        assert torch.equal(values, weights[name]), name


def test_arguments_of_runs_describe_patterns() -> None:
    """Read both names of the pattern, with stages, and what else a run with one has."""
    written = vars(arguments_of(pattern("M*-G"), {}, 32, 56))
    assert written["hybrid_layer_pattern"] == "M*-G"
    assert written["spec"] == ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    of_run = {"moe_layer_freq": 1, "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4}
    old = written | of_run | {"hybrid_layer_pattern": None, "hybrid_override_pattern": "M*|-G", "num_layers": None}
    assert model_of(old) == replace(model_of(written), vocab_size=None)
    assert {fate.kind for fate in argument_fates(old)} == {"used", "noted"}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"hybrid_layer_pattern": "M*D-"}, "'D', character 3, is sparse attention"),
        ({"hybrid_layer_pattern": "M*/*/-"}, "has the depths '*' and '-': give all of them the same letters"),
        ({"hybrid_layer_pattern": 7}, "--hybrid-layer-pattern 7: megalite has no such network"),
        ({"hybrid_layer_pattern": None}, "--is-hybrid-model True: megalite has no such network"),
        ({"spec": ["my.layers", "spec"]}, "--spec"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers 1: give the letters of a depth in --hybrid-layer-pattern"),
        ({"mtp_hsm": True}, "--mtp-hsm True: megalite has no such network"),
        ({"normalization": "LayerNorm"}, "a gated delta net without --normalization RMSNorm, or with"),
        ({"apply_layernorm_1p": True}, "RMSNorm, or with --apply-layernorm-1p: its norm is the network's in Megatron"),
        ({"swiglu": False, "squared_relu": True}, "a gated delta net without --swiglu"),
        ({"mamba_num_groups": 5}, "is not a multiple of --mamba-num-groups 5"),
    ],
)
def test_other_patterns_are_refused(changed: dict[str, Any], problem: str) -> None:
    written = vars(arguments_of(pattern("M*-G"), {}, 32, 56))
    with pytest.raises(CheckpointError) as raised:
        model_of(written | changed)
    assert problem in str(raised.value)


@pytest.mark.parametrize("letters", ["K*-", "*-L"])
def test_letters_of_megalites_own_are_not_written(letters: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--hybrid-layer-pattern with [KL]: such layers are not converted"):
        write(random_model(pattern(letters)), tmp_path)


def test_what_megatron_has_otherwise_is_not_written() -> None:
    """Such a network is one of megalite, so the error does not say that it has none."""
    for option in ({"normalization": "LayerNorm"}, {"apply_layernorm_1p": True}, {"swiglu": False}):
        with pytest.raises(CheckpointError, match=r"a gated delta net with.* in Megatron-LM, .* in megalite") as raised:
            arguments_of(replace(pattern("M*-G"), **option), {}, 32, 56)
        assert "megalite has no" not in str(raised.value)


def test_what_megatron_has_no_argument_for_is_not_written() -> None:
    for option in ({"mamba_dt_min": 0.001}, {"mamba_conv_kernel_dim": 3}, {"linear_allow_neg_eigval": True}):
        with pytest.raises(CheckpointError, match=r"Megatron-LM has no such network:\n  --"):
            arguments_of(replace(pattern("M*-G"), **option), {}, 32, 56)

"""Folders of models with recurrent layers: published configurations, what is refused, decays in fp32, other forms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megalite.checkpoint.compatibility import check_same_function
from megalite.config.layer_specs import pattern_of
from megalite.conversion.families import FAMILIES
from megalite.conversion.family import Family, choose
from megalite.conversion.huggingface import open_huggingface, write_huggingface
from megalite.conversion.key_fates import fates_of_folder
from megalite.conversion.native import open_megalite, write_megalite
from megalite.conversion.verification import logits
from megalite.errors import CheckpointError
from tests.harness import huggingface as theirs

LOGITS = 1e-5
INFINITE = [0.0, float("inf")]
NANO_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
NEMOTRON = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "use_bias": False,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 1e-4,
    "time_step_limit": INFINITE,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 256,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 131072,
}
PUBLISHED: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "Nemotron Nano 9B v2": (
        NEMOTRON
        | {"hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"}
        | {"num_hidden_layers": 56, "hidden_size": 4480, "intermediate_size": 15680, "num_attention_heads": 40}
        | {"mamba_num_heads": 128, "mamba_head_dim": 80, "max_position_embeddings": 131072, "num_query_groups": 8},
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        {"mamba_dt_min": 0.001, "mamba_num_heads": 128, "kv_groups": 8, "position_embedding_type": "none"},
    ),
    "Nemotron 3 Nano 30B": (
        NEMOTRON
        | {"hybrid_override_pattern": NANO_PATTERN, "num_hidden_layers": 52, "hidden_size": 2688, "topk_group": 1}
        | {"intermediate_size": 1856, "num_attention_heads": 32, "num_key_value_heads": 2, "mamba_num_heads": 64}
        | {"mamba_head_dim": 64, "max_position_embeddings": 262144, "moe_intermediate_size": 1856, "n_group": 1}
        | {"moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128, "n_shared_experts": 1}
        | {"norm_topk_prob": True, "num_experts_per_tok": 6, "routed_scaling_factor": 2.5, "rope_theta": 10000}
        | {"partial_rotary_factor": 1.0, "mamba_ssm_cache_dtype": "float32", "norm_eps": 1e-5},
        NANO_PATTERN,
        {"num_experts": 128, "moe_router_topk": 6, "moe_router_enable_expert_bias": True, "squared_relu": True},
    ),
    "Bamba 9B": (
        {"model_type": "bamba", "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "hidden_size": 4096}
        | {"intermediate_size": 14336, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4}
        | {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128}
        | {"mamba_proj_bias": False, "max_position_embeddings": 262144, "mlp_bias": False, "num_attention_heads": 32}
        | {"num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
        | {"rope_scaling": None, "tie_word_embeddings": False, "vocab_size": 128256, "hidden_act": "silu"},
        "M-" * 9 + "*-" + "M-" * 8 + "*-" + "M-" * 8 + "*-" + "M-" * 4,
        {"rotary_percent": 0.5, "mamba_head_dim": 64, "mamba_num_groups": 1, "mamba_dt_max": None},
    ),
    "Qwen3-Next 80B": (
        {"model_type": "qwen3_next", "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256}
        | {"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4}
        | {"linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
        | {"linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": []}
        | {"moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512}
        | {"num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
        | {"partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000000, "vocab_size": 151936}
        | {"shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "router_aux_loss_coef": 0.001},
        "GEGEGE*E" * 12,
        {"rotary_percent": 0.25, "attention_output_gate": True, "apply_layernorm_1p": True, "num_experts": 512},
    ),
    "Qwen3.5, its text model": (
        {"model_type": "qwen3_5_text", "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256}
        | {"hidden_size": 4096, "intermediate_size": 12288, "mamba_ssm_dtype": "float32", "vocab_size": 248320}
        | {"max_position_embeddings": 262144, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
        | {"num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 4, "output_gate_type": "swish"}
        | {
            "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"}
            | {"rope_theta": 10000000, "partial_rotary_factor": 0.25}
        },
        "G-G-G-*-" * 8,
        {"rotary_base": 1e7, "rotary_percent": 0.25, "linear_num_value_heads": 32, "num_experts": None},
    ),
    "OLMo-Hybrid 7B": (
        {"model_type": "olmo_hybrid", "attention_bias": False, "hidden_act": "silu", "hidden_size": 3840}
        | {"initializer_range": 0.02, "intermediate_size": 11008, "linear_a_log_max": 16.0, "linear_a_log_min": 0.0}
        | {"linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4, "linear_dt_max": 0.1, "linear_dt_min": 0.001}
        | {"max_position_embeddings": 65536, "num_attention_heads": 30, "num_hidden_layers": 32, "rms_norm_eps": 1e-6}
        | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}, "vocab_size": 100352}
        | {"eos_token_id": 100257, "pad_token_id": 100277, "tie_word_embeddings": False, "use_cache": True},
        "G-G-G-*-" * 8,
        {"position_embedding_type": "none", "linear_key_head_dim": 96, "linear_value_head_dim": 192}
        | {"linear_num_key_heads": 30, "linear_norm_epsilon": 1e-5, "kv_groups": 30}
        | {"output_norm_freq": str(([0] * 6 + [1] * 2) * 8)},
    ),
    "LFM2 1.2B": (
        {"model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288}
        | {"block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256}
        | {"block_norm_eps": 1e-5, "block_out_init_scale": 1.0, "block_use_swiglu": True, "conv_L_cache": 3}
        | {"block_use_xavier_init": True, "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048}
        | {"conv_use_xavier_init": True, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048}
        | {"initializer_range": 0.02, "max_position_embeddings": 128000, "norm_eps": 1e-5, "num_heads": 32}
        | {"num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1000000.0}
        | {"use_cache": True, "use_pos_enc": True, "vocab_size": 65536},
        "L-L-*-L-L-*-L-L-*-L-*-L-*-L-*-L-",
        {"ffn_hidden_size": 8192, "qk_layernorm": True, "short_conv_kernel_dim": 3, "rotary_base": 1e6},
    ),
}


def family_of(config: dict[str, Any]) -> Family:
    return next(family for family in FAMILIES if family.name == config["model_type"])


@pytest.mark.parametrize("what", PUBLISHED)
def test_published_configurations_are_read_and_written(what: str) -> None:
    config, pattern, said = PUBLISHED[what]
    model = family_of(config).model(config)
    assert pattern_of(model.layers) == pattern
    assert {name: getattr(model, name) for name in said} == said
    family, written = choose(FAMILIES, model)
    assert family is family_of(config) or what.startswith("Qwen3-Next")  # Qwen3.5 has this network, too
    assert pattern_of(family.model(written).layers) == pattern
    fates = {fate.key: fate.kind for fate in family_of(config).key_fates(config)}
    assert "refused" not in fates.values()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_epsilon": 1e-6}, "the nearest is nemotron_h, except --norm-epsilon 1e-06"),
        ({"mamba_dt_max": 0.5}, "the nearest is nemotron_h, except --mamba-dt-max 0.5"),
        ({"residual_multiplier": 0.5}, "the nearest is nemotron_h, except --residual-multiplier 0.5"),
        ({"moe_router_enable_expert_bias": False}, "except --moe-router-enable-expert-bias False"),
    ],
)
def test_a_network_of_no_family_is_refused_by_its_flags(changes: dict[str, Any], message: str) -> None:
    config = PUBLISHED["Nemotron 3 Nano 30B"][0]
    with pytest.raises(CheckpointError, match=message):
        choose(FAMILIES, replace(family_of(config).model(config), **changes))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a kind of layer": (
        "nemotron-h",
        {"layers_block_type": ["mamba", "rwkv"]},
        "layers_block_type has 'rwkv', which is",
    ),
    "a letter": ("nemotron-h", {"hybrid_override_pattern": "ME*K"}, "hybrid_override_pattern is 'ME*K', it must be of"),
    "two orders": ("nemotron-h", {"hybrid_override_pattern": "ME*-"}, "layers_block_type and layer_types differ"),
    "no order": ("nemotron-h", {"layers_block_type": "gone"}, "it has no hybrid_override_pattern and no layers_block"),
    "an order that is none": ("nemotron-h", {"layers_block_type": "ME*-"}, "layers_block_type is 'ME*-', it must be a"),
    "a number of other layers": ("nemotron-h", {"num_hidden_layers": 9}, "num_hidden_layers is 9 for 6 layers of the"),
    "layers without end": (
        "nemotron-h",
        {"hybrid_override_pattern": "M" * 10**6, "layers_block_type": "gone"},
        "hybrid_override_pattern is 'MMM",
    ),
    "biases": ("nemotron-h", {"use_bias": True}, "use_bias is True, but only False is supported"),
    "another name with another value": (
        "nemotron-h",
        {"attention_head_dim": 7},
        "attention_head_dim is 7, and head_dim",
    ),
    "an epsilon of Mamba-2": ("nemotron-h", {"layer_norm_epsilon": 1e-6}, "1e-06, but Mamba-2 layers have only 1e-05"),
    "a limit without effect": ("nemotron-h", {"time_step_limit": [0.0, 0.1]}, "which transformers does not apply"),
    "heads in groups": ("nemotron-h", {"n_groups": 3}, "--mamba-num-heads 4 is not a multiple of --mamba-num-groups 3"),
    "layers of attention that are none": ("bamba", {"attn_layer_indices": [4]}, "must be a list of numbers below 4"),
    "a factor that is none": (
        "granite",
        {"attention_multiplier": 0.0},
        "attention_multiplier is 0.0, it must be",
    ),
    "a factor below 0": (
        "granite",
        {"attention_multiplier": -0.25},
        "attention_multiplier is -0.25, it must be",
    ),
    "a width that is another": ("bamba", {"mamba_d_head": 4}, "mamba_n_heads times mamba_d_head is another"),
    "an expansion that is none": ("bamba", {"mamba_expand": "x" * 10**6}, "mamba_expand is 'xxx"),
    "all of a head": ("bamba", {"attn_rotary_emb": 8}, "is not half of a head"),
    "an activation of the convolution": ("bamba", {"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu' is"),
    "a kind of Qwen's": ("qwen3-next", {"layer_types": ["mamba"] * 4}, "layer_types has 'mamba', which is unknown"),
    "kinds of other layers": ("qwen3-next", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4"),
    "an interval of none": (
        "qwen3.5",
        {"layer_types": "gone", "full_attention_interval": 0},
        "full_attention_interval is 0, it must be",
    ),
    "an attention without a gate": ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate is False, but only True"),
    "heads of values": ("qwen3.5", {"linear_num_value_heads": 3}, "--linear-num-value-heads 3 is not a multiple of"),
    "a kind of LFM2's": (
        "lfm2",
        {"layer_types": ["mamba"] * 4},
        "layer_types has 'mamba', which is unknown: conv, full",
    ),
    "layers of other numbers": ("olmo-hybrid", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4"),
    "positions that are nothing": (
        "olmo-hybrid",
        {"rope_parameters": None},
        "rope_parameters is null, which versions of",
    ),
    "a width of heads that is none": (
        "olmo-hybrid",
        {"linear_key_head_dim": None, "linear_num_key_heads": "many"},
        "linear_num_key_heads 'many'",
    ),
    "convolutions of other layers": ("lfm2", {"layer_types": ["conv"]}, "layer_types has 1 entries for 4 layers"),
    "places that are none": (
        "lfm2",
        {"layer_types": "gone", "full_attn_idxs": "all"},
        "full_attn_idxs is 'all', it must be a list",
    ),
    "heads without end": ("qwen3.5", {"linear_num_key_heads": 10**9, "linear_num_value_heads": 10**9}, "too few for"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_layer_computes_is_refused(what: str, tmp_path: Path) -> None:
    name, changes, message = REFUSED[what]
    config = theirs.as_written(theirs.make_config(name)) | changes
    config = {key: value for key, value in config.items() if value != "gone"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as raised:
        open_huggingface(tmp_path)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 1500
    assert str(raised.value).count(message) == 1


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32])
def test_decays_stay_in_fp32(saved: torch.dtype, tmp_path: Path) -> None:
    theirs.save(tmp_path / "theirs", "nemotron-h-dense")
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    decays = {name: values.to(saved) for name, values in tensors.items() if name.endswith(("A_log", "dt_bias", ".D"))}
    save_file(
        {name: values.bfloat16() for name, values in tensors.items()} | decays,
        tmp_path / "theirs" / "model.safetensors",
    )
    opened = open_huggingface(tmp_path / "theirs")
    assert opened.dtype == torch.bfloat16
    write_megalite(opened, tmp_path / "run", dtype=None, layout=None, workers=1, advance=lambda _: None)
    native = open_megalite(tmp_path / "run")
    assert native.source.tensors["layers.0.mamba.A_log"].dtype == torch.float32
    assert native.source.tensors["layers.0.mamba.x"].dtype == native.dtype == torch.bfloat16
    write_huggingface(native, tmp_path / "out", dtype=torch.float16, shard=10**9, workers=1, advance=lambda _: None)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert len(decays) == 9
    assert all(torch.equal(written[name], values.float()) for name, values in decays.items())
    assert written["lm_head.weight"].dtype == torch.float16


def test_decays_of_a_gpt_stay_in_fp32(tmp_path: Path) -> None:
    theirs.save(tmp_path / "theirs", "qwen3-next")
    pattern = open_huggingface(tmp_path / "theirs")
    layers = pattern.config.layers
    linear = [int(layer.mixer == "gated_delta") for layer in layers if layer.mixer is not None]
    gpt = replace(
        pattern.config,
        num_layers=len(linear),
        hybrid_layer_pattern=None,
        moe_layer_freq=str([int(layer.feed_forward == "moe") for layer in layers if layer.feed_forward is not None]),
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=str(linear),
    )
    check_same_function("it", pattern.config, gpt)
    write_megalite(
        replace(pattern, config=gpt),
        tmp_path / "run",
        dtype=torch.bfloat16,
        layout=None,
        workers=1,
        advance=lambda _: None,
    )
    native = open_megalite(tmp_path / "run")
    assert native.config.hybrid_layer_pattern is None
    assert native.dtype == torch.bfloat16
    for dtype in (None, torch.float16):
        write_huggingface(native, tmp_path / str(dtype), dtype=dtype, shard=10**9, workers=1, advance=lambda _: None)
        tensors = load_file(tmp_path / str(dtype) / "model.safetensors")
        decays = {name for name in tensors if name.endswith(("A_log", "dt_bias"))}
        assert len(decays) == 2 * sum(linear)
        assert {name for name, each in tensors.items() if each.dtype == torch.float32} == decays
        config = json.loads((tmp_path / str(dtype) / "config.json").read_text())
        assert config["torch_dtype"] == ("float16" if dtype else "bfloat16")


def test_names_of_other_programs_are_read(tmp_path: Path) -> None:
    tokens = theirs.tokens()
    for name, old, new in (
        ("nemotron-h-dense", "backbone.", "model."),
        ("nemotron-h-dense", "backbone.", ""),
        ("qwen3.5", "model.", "model.language_model."),
    ):
        folder = tmp_path / f"{name}{new}"
        expected = theirs.logits(theirs.save(folder, name), tokens)
        tensors = load_file(folder / "model.safetensors")
        renamed = {key.replace(old, new, 1) if key.startswith(old) else key: each for key, each in tensors.items()}
        assert renamed.keys() != tensors.keys()
        further = {"mtp.layers.0.norm.weight": torch.ones(24)}
        save_file(renamed | further, folder / "model.safetensors")
        opened = open_huggingface(folder)
        assert "1 tensors of layers that predict further tokens (MTP), such as mtp.layers.0" in opened.notes[0]
        assert (logits(opened, tokens) - expected).abs().max() <= LOGITS


def test_the_text_model_of_one_that_sees_images_is_read(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 24}
    text = theirs.make_config("qwen3.5").to_dict()
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision | {"patch_size": 2}, image_token_id=66)
    model = transformers.Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path / "theirs")
    opened = open_huggingface(tmp_path / "theirs")
    assert "tensors of layers that see images, such as model.visual." in opened.notes[0]
    tokens = theirs.tokens() % 60  # no images
    expected = theirs.logits(model, tokens)
    assert expected.abs().max() > 1e-2
    assert (logits(opened, tokens) - expected).abs().max() <= LOGITS
    fates = fates_of_folder(tmp_path / "theirs")
    kinds = {fate.key: fate.kind for place in ("config.json", "config.json, text_config") for fate in fates[place]}
    assert [kinds[name] for name in ("vision_config", "text_config", "hidden_size")] == ["noted", "used", "used"]
    family = write_huggingface(opened, tmp_path / "out", dtype=None, shard=10**9, workers=1, advance=lambda _: None)
    assert family.name == "qwen3_5_text"
    assert (theirs.logits(theirs.load(tmp_path / "out")[0], tokens) - expected).abs().max() <= LOGITS
    path = tmp_path / "theirs" / "config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"of_tomorrow": 1}))
    with pytest.raises(CheckpointError, match="of_tomorrow is unknown: 1"):
        open_huggingface(tmp_path / "theirs")
    path.write_text(json.dumps(written | {"tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match="tie_word_embeddings is True, but False in text_config"):
        open_huggingface(tmp_path / "theirs")


@pytest.mark.wide
def test_experts_of_nemotron_that_are_one_tensor_are_read(tmp_path: Path) -> None:
    expected = theirs.logits(theirs.save(tmp_path, "nemotron-h", save_original_format=False), theirs.tokens())
    assert any(name.endswith("experts.up_proj") for name in load_file(tmp_path / "model.safetensors"))
    assert (logits(open_huggingface(tmp_path), theirs.tokens()) - expected).abs().max() <= LOGITS

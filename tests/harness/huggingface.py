"""Small models of transformers, of every family that is converted; no parameter keeps its initial value."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

_SIZES = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 3,
    "eos_token_id": 5,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_GRANITE = {
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "rms_norm_eps": 1e-5,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rms_norm_eps": 1e-3,  # so that small outputs, and their rounding, are not made large
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "partial_rotary_factor": 0.5,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "rms_norm_eps": 0.1,  # so that small outputs, and their rounding, are not made large; latents' norms have 1e-6
}
_INDEXER = {"index_n_heads": 32, "index_head_dim": 6, "index_topk": 7}
"""So many heads that one gives each key a score above 0: equal scores are chosen by index here, anyhow there."""
_LATENT_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_HALF = {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5}

CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"rope_theta": 500.0}),
    "llama-scaled": (
        transformers.LlamaConfig,
        {"rope_scaling": _LLAMA3, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    ),
    "llama-linear": (
        transformers.LlamaConfig,
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-yarn": (
        transformers.LlamaConfig,
        {"rope_scaling": _YARN, "num_key_value_heads": 4, "max_position_embeddings": 256},
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": 5}),
    "mistral-full": (transformers.MistralConfig, {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": (transformers.Qwen2Config, {"head_dim": 6, "tie_word_embeddings": True}),
    "qwen2-window": (
        transformers.Qwen2Config,
        {"head_dim": 6, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3},
    ),
    "qwen3": (
        transformers.Qwen3Config,
        {
            "rope_scaling": _YARN | {"original_max_position_embeddings": 4096, "beta_fast": 16.0, "truncate": False},
            "max_position_embeddings": 16384,
        },
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
    "qwen2-moe": (
        transformers.Qwen2MoeConfig,
        {
            "head_dim": 6,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 12,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    "glm4-moe": (
        transformers.Glm4MoeConfig,
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "routed_scaling_factor": 2.5,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "glm4-moe-one": (
        transformers.Glm4MoeConfig,
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "moe_intermediate_size": 8,
            "num_nextn_predict_layers": 0,
        },
    ),
    "olmo2": (transformers.Olmo2Config, {"rope_theta": 500.0}),
    "olmoe": (transformers.OlmoeConfig, {"head_dim": 6, "num_experts": 5, "num_experts_per_tok": 3}),
    "minimax-m2": (
        transformers.MiniMaxM2Config,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "rope_parameters": _HALF, "num_key_value_heads": 4},
    ),
    "nemotron-h": (
        transformers.NemotronHConfig,
        {
            "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 6,
            "ssm_state_size": 8,
            "n_groups": 2,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 12,
            "routed_scaling_factor": 2.5,
            "n_group": 2,
            "topk_group": 1,
            "time_step_min": 0.5,
        },
    ),
    "nemotron-3": (
        transformers.NemotronHConfig,
        {
            "layers_block_type": ["moe", "mamba", "attention", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 6,
            "ssm_state_size": 8,
            "n_groups": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_latent_size": 12,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 12,
        },
    ),
    "nemotron-h-dense": (
        transformers.NemotronHConfig,
        {
            "layers_block_type": ["mamba", "mlp", "mamba", "mamba", "mlp", "attention"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 4,
            "ssm_state_size": 5,
            "n_groups": 2,
            "conv_kernel": 3,
        },
    ),
    "bamba": (
        transformers.BambaConfig,
        {
            "attn_layer_indices": [1, 3],
            "mamba_n_heads": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 16,
            "time_step_limit": (0.3, 1.2),
        },
    ),
    "granite": (
        transformers.GraniteMoeHybridConfig,
        _GRANITE
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "position_embedding_type": "rope",
            "shared_intermediate_size": 16,
        },
    ),
    "granite-dense": (
        transformers.GraniteMoeHybridConfig,
        _GRANITE | {"num_local_experts": 0, "shared_intermediate_size": 40, "tie_word_embeddings": True},
    ),
    "qwen3-next": (
        transformers.Qwen3NextConfig,
        _DELTA
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 12,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3.5": (transformers.Qwen3_5TextConfig, _DELTA | {"linear_num_value_heads": 2, "full_attention_interval": 2}),
    "qwen3.5-moe": (
        transformers.Qwen3_5MoeTextConfig,
        _DELTA
        | {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 12,
        },
    ),
    "olmo-hybrid": (
        transformers.OlmoHybridConfig,
        {
            # One that remembers: with writes twice as strong, rounding grows from one to the next.
            "layer_types": ["full_attention", "full_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 8,
        },
    ),
    "olmo-hybrid-without-positions": (
        transformers.OlmoHybridConfig,
        {
            "layer_types": ["linear_attention", "full_attention", "full_attention", "full_attention"],
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},
            "linear_allow_neg_eigval": False,
            "linear_value_head_dim": 6,
        },
    ),
    "lfm2": (
        transformers.Lfm2Config,
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "block_multiple_of": 4,
            "block_ffn_dim_multiplier": 1.3,
            "conv_L_cache": 4,
        },
    ),
    "lfm2-biases": (
        transformers.Lfm2Config,
        {
            "full_attn_idxs": [2],
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
            "rope_theta": 1e4,
        },
    ),
    "deepseek-v2": (
        transformers.DeepseekV2Config,
        _LATENT
        | {
            "q_lora_rank": 12,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "rope_parameters": _LATENT_YARN | {"mscale": 0.7, "mscale_all_dim": 1.5},
            "max_position_embeddings": 128,
        },
    ),
    "deepseek-v2-lite": (
        transformers.DeepseekV2Config,
        _LATENT | {"q_lora_rank": None, "n_shared_experts": 1, "v_head_dim": 16, "rms_norm_eps": 1e-6},
    ),
    "deepseek-v3": (
        transformers.DeepseekV3Config,
        _LATENT
        | {
            "q_lora_rank": 12,
            "first_k_dense_replace": 2,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": _LATENT_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16.0},
            "max_position_embeddings": 128,
            "num_nextn_predict_layers": 0,
        },
    ),
    "moonlight": (
        transformers.DeepseekV3Config,
        _LATENT
        | {
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "rope_theta": 5e4,
            "tie_word_embeddings": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "deepseek-v32": (
        transformers.DeepseekV32Config,
        _LATENT
        | _INDEXER
        | {
            "q_lora_rank": 12,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": _LATENT_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16.0},
            "max_position_embeddings": 128,
            "num_nextn_predict_layers": 0,
        },
    ),
    "glm-moe-dsa": (
        transformers.GlmMoeDsaConfig,
        _LATENT
        | _INDEXER
        | {
            "q_lora_rank": 12,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "indexer_types": ["full", "shared", "full", "shared"],
            "rope_theta": 700.0,
            "num_nextn_predict_layers": 0,
        },
    ),
    "kimi-linear": (
        transformers.KimiLinearConfig,
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 5,
            "num_experts": 6,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 12,
            "rms_norm_eps": 1e-2,
            "linear_attn_config": {
                "kda_layers": [1, 2, 4],
                "full_attn_layers": [3],
                "num_heads": 2,
                "head_dim": 6,
                "short_conv_kernel_size": 3,
            },
        },
    ),
    "gpt-oss": (
        transformers.GptOssConfig,
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 6,
            "swiglu_limit": 1.0,
            "rope_scaling": _YARN | {"truncate": False},
            "max_position_embeddings": 256,
        },
    ),
    "gpt-oss-plain": (
        transformers.GptOssConfig,
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
            "rope_scaling": {"rope_type": "default"},
        },
    ),
    "gpt2": (
        transformers.GPT2Config,
        {"n_embd": 24, "n_layer": 4, "n_head": 4, "n_positions": 64, "n_inner": 40},
    ),
    "gpt2-exact": (
        transformers.GPT2Config,
        {"n_embd": 24, "n_layer": 4, "n_head": 4, "n_positions": 64, "activation_function": "gelu"},
    ),
    "gpt-neox": (transformers.GPTNeoXConfig, {"hidden_size": 32}),
    "gpt-neox-sequential": (
        transformers.GPTNeoXConfig,
        {"use_parallel_residual": False, "rotary_pct": 1.0, "tie_word_embeddings": True},
    ),
    "gemma": (transformers.GemmaConfig, {}),
    "gemma2": (transformers.Gemma2Config, {"sliding_window": 6, "query_pre_attn_scalar": 11}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "sliding_window": 6,
            "query_pre_attn_scalar": 11,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
}


_HEADS_OF_HIDDEN = (transformers.Qwen2Config, transformers.Qwen2MoeConfig, transformers.OlmoeConfig)
_HEADS_OF_HIDDEN += (transformers.Olmo2Config, transformers.OlmoHybridConfig)
_HEADS_OF_HIDDEN += (transformers.DeepseekV2Config, transformers.DeepseekV3Config, transformers.KimiLinearConfig)
_HEADS_OF_HIDDEN += (transformers.DeepseekV32Config, transformers.GlmMoeDsaConfig)
"""Families in which the width of a head follows from other sizes."""
_LAST_NORMS = {"transformer.ln_f.weight", "gpt_neox.final_layer_norm.weight"}
_LAST_NORMS |= {f"model.{name}.weight" for name in ("norm", "norm_f", "final_layernorm", "embedding_norm")}


def make_config(name: str, changes: Mapping[str, Any] | None = None) -> PretrainedConfig:
    """Return the configuration of a model of `CONFIGS`."""
    kind, own = CONFIGS[name]
    sizes = dict(_SIZES)
    if kind is transformers.GPT2Config:
        sizes = {name: sizes[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    elif kind is transformers.GPTNeoXConfig:
        del sizes["num_key_value_heads"], sizes["head_dim"]
    elif kind in _HEADS_OF_HIDDEN:
        del sizes["head_dim"]
        own = {key: value for key, value in own.items() if key != "head_dim"}
    return kind(**(sizes | own | dict(changes or {})))


def as_written(config: PretrainedConfig) -> dict[str, Any]:
    """Return the contents of its config.json."""
    written: dict[str, Any] = json.loads(config.to_json_string())
    return written


def make_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return an fp32 model for evaluation, with large matrices and norms that are not 1, so that errors are visible.

    The last norm is small, so that logits are about 1.
    """
    around_one = config.model_type.startswith(("gemma", "qwen3_next", "qwen3_5"))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            norm = parameter.dim() == 1 and "bias" not in name
            last = name in _LAST_NORMS
            weight = (values * 0.3 + norm) * (0.2 if last else 1.0)
            parameter.copy_(weight - float(norm and around_one))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model


def save(folder: Path, name: str, changes: Mapping[str, Any] | None = None, **options: Any) -> PreTrainedModel:
    """Write such a model as `save_pretrained` does, and return it."""
    model = make_model(make_config(name, changes))
    original = "save_original_format" not in options
    if original and model.config.model_type == "olmo_hybrid":
        model.save_pretrained(folder, **options, save_original_format=False)
        write_published_olmo_hybrid(folder)
        return model
    model.save_pretrained(folder, **options)
    if original and model.config.model_type == "kimi_linear":
        write_published_kimi_linear(folder)
    return model


def add_prediction_layers(folder: Path, depths: int, seed: int = 7) -> dict[str, Tensor]:
    """Give a folder layers that predict further tokens, as DeepSeek-V3 is published, and return all its tensors."""
    config = json.loads((folder / "config.json").read_text())
    layers, tensors = config["num_hidden_layers"], load_file(folder / "model.safetensors")
    begin, generator = f"model.layers.{layers - 1}.", torch.Generator().manual_seed(seed)
    own = {name.removeprefix(begin): tensor for name, tensor in tensors.items() if name.startswith(begin)}
    word = tensors["model.embed_tokens.weight"]
    one, width = torch.ones(word.shape[1]), word.shape[1]
    own |= {f"{name}.weight": one for name in ("enorm", "hnorm", "shared_head.norm")}
    own |= {"eh_proj.weight": torch.empty(width, 2 * width)}
    first = "model.layers.0."  # has an indexer even if the last one has none
    own |= {
        name.removeprefix(first): tensor for name, tensor in tensors.items() if name.startswith(f"{first}self_attn.i")
    }
    for number in range(layers, layers + depths):
        for name, like in own.items():
            values = torch.randn(like.shape, generator=generator)
            scale = 0.1 if "bias" in name else 0.3
            around = float(name.endswith("norm.weight"))
            tensors[f"model.layers.{number}.{name}"] = (values * scale + around) * (0.2 if "shared" in name else 1.0)
        tensors[f"model.layers.{number}.embed_tokens.weight"] = word.clone()
        tensors[f"model.layers.{number}.shared_head.head.weight"] = tensors.get("lm_head.weight", word).clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": depths}))
    return tensors


@torch.no_grad()
def logits_of_depths(folder: Path, depths: int, ids: Tensor) -> list[Tensor]:
    """Return the logits [batch, sequence - depth, vocabulary] of each depth, as transformers computes them."""
    model, _ = load(folder)
    layers = model.config.num_hidden_layers
    # transformers 5.24 knows only the numbers of published models.
    numbers = "|".join(str(layers + depth) for depth in range(depths))
    model._keys_to_ignore_on_load_unexpected = [rf"layers\.(?:{numbers})\."]
    if model.config.model_type == "deepseek_v32":  # it does not know of its sparse attention there, but computes it
        model.config.num_mtp_layers = depths
        model.config.mtp_layer_types, model.config.mtp_mlp_layer_types = (
            ["full_attention"] * depths,
            ["sparse"] * depths,
        )
    predicting = MtpModel.from_pretrained(model).eval()
    hidden, found = model(input_ids=ids, output_hidden_states=True).hidden_states[-1], []
    for depth in range(1, depths + 1):
        hidden, later = hidden[:, :-1], ids[:, depth:]
        positions = torch.arange(later.shape[1])[None]
        hidden = predicting.forward_layer(depth - 1, hidden, positions, None, input_ids=later)
        found.append(model.lm_head(hidden))
    return found


def write_published_kimi_linear(folder: Path) -> None:
    """Give the dense layers of a folder the names of published files: transformers 5.24 gives them the experts'."""
    named = {
        re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(named, folder / "model.safetensors", {"format": "pt"})


def write_published_olmo_hybrid(folder: Path) -> None:
    """Give the tensors of a folder the names and the cuts of published files.

    transformers 5.24 reads them, but writes convolutions cut into three equal parts, and another norm's name.
    """
    config = json.loads((folder / "config.json").read_text())
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    found: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer = int(name.split(".")[2]) if "layers." in name else None
        if name.endswith("conv1d.weight"):
            sizes = [keys, keys, len(tensor) - 2 * keys]
            for part, rows in zip("qkv", tensor.split(sizes), strict=True):
                found[name.replace("conv1d", f"{part}_conv1d")] = rows.contiguous()
        elif layer is not None and config["layer_types"][layer] == "linear_attention":
            of_mlp = name.replace("post_attention_layernorm", "feedforward_layer_norm")
            found[of_mlp.replace("input_layernorm", "attention_layer_norm")] = tensor
        else:
            found[name] = tensor
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def load(folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Read a folder in fp32; return the model, and its tensors that were missing, unexpected or of another shape."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True, attn_implementation="eager"
    )
    return model.eval(), info


def tokens(seed: int = 1) -> Tensor:
    """Return tokens [batch, sequence], more than 32 of them per sequence."""
    return torch.randint(0, _SIZES["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return logits [batch, sequence, vocabulary]."""
    found: Tensor = model(input_ids=ids).logits
    return found

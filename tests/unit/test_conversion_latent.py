"""Folders of models with attention over latents: published configurations, what is refused, routers, other forms."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import GlmMoeDsaConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from megalite.checkpoint.loading import load_weights
from megalite.config import ModelConfig
from megalite.config.layer_specs import pattern_of
from megalite.conversion.export import without_unknown_depths
from megalite.conversion.families import FAMILIES
from megalite.conversion.family import choose
from megalite.conversion.huggingface import family_of, open_huggingface, write_huggingface
from megalite.conversion.native import open_megalite, write_megalite
from megalite.conversion.opened import OpenedModel
from megalite.conversion.verification import logits, verify
from megalite.errors import CheckpointError
from megalite.inference.loading import open_model
from megalite.model.batch import FurtherTokens, LayerContext, MicroBatch
from megalite.model.gpt import GPT
from megalite.model.router import Router
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout
from megalite.parallel.stage import TermSums
from megalite.training.batches import further_tokens
from tests.end_to_end.runs import PRETRAIN
from tests.harness import huggingface as theirs
from tests.harness.job import Job
from tests.harness.tool import run_tool

pytestmark = pytest.mark.costly

LOGITS = 1e-5
MATTERS = 1e-4
Json = dict[str, Any]
_COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}
_DEEPSEEK = _COMMON | {"aux_loss_alpha": 0.001, "ep_size": 1, "pretraining_tp": 1, "seq_aux": True}
_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_V3 = _DEEPSEEK | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-6,
}
_K2 = (
    _V3
    | {"model_type": "kimi_k2", "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1}
    | {"hidden_size": 7168, "intermediate_size": 18432, "max_position_embeddings": 131072, "n_group": 1}
    | {"moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1, "num_attention_heads": 64}
    | {"num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64, "q_lora_rank": 1536}
    | {"num_nextn_predict_layers": 0, "quantization_config": _FP8, "routed_scaling_factor": 2.827}
    | {"rope_scaling": _YARN | {"beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}}
    | {"rope_theta": 50000.0, "topk_group": 1, "vocab_size": 163840}
)
_READ_K2 = (
    "+-" + "+E" * 60,
    {"num_experts": 384, "rotary_base": 50000.0, "moe_router_num_groups": None, "num_attention_heads": 64},
)
_V3_671B = (
    _V3
    | {"bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 3, "hidden_size": 7168, "n_group": 8}
    | {"intermediate_size": 18432, "max_position_embeddings": 163840, "moe_intermediate_size": 2048}
    | {"n_routed_experts": 256, "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8}
    | {"num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536}
    | {"quantization_config": _FP8, "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
    | {"routed_scaling_factor": 2.5, "topk_group": 4, "vocab_size": 129280}
)
_V32 = (
    _V3_671B
    | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
    | {"quantization_config": _FP8 | {"scale_fmt": "ue8m0"}}
)
_GLM5 = (
    {name: value for name, value in _COMMON.items() if name not in ("rope_theta", "torch_dtype")}
    | {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16", "ep_size": 1}
    | {"eos_token_id": [154820, 154827, 154829], "pad_token_id": 154820, "first_k_dense_replace": 3, "head_dim": 64}
    | {"hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "n_group": 1}
    | {"indexer_rope_interleave": True, "rope_interleave": True, "intermediate_size": 12288, "topk_group": 1}
    | {"max_position_embeddings": 202752, "moe_intermediate_size": 2048, "n_routed_experts": 256, "vocab_size": 154880}
    | {"n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8}
    | {"num_hidden_layers": 78, "num_key_value_heads": 64, "num_nextn_predict_layers": 1, "pretraining_tp": 1}
    | {"q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192, "rms_norm_eps": 1e-5, "v_head_dim": 256}
    | {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "routed_scaling_factor": 2.5}
    | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "transformers_version": "5.0.2.dev0"}
)
PUBLISHED: dict[str, tuple[Json, str, Json]] = {
    "DeepSeek-V2 Lite": (
        _DEEPSEEK
        | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "bos_token_id": 100000}
        | {"eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944}
        | {"max_position_embeddings": 163840, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64}
        | {"n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6}
        | {"num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None, "rms_norm_eps": 1e-6}
        | {"rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "routed_scaling_factor": 1.0}
        | {"scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy", "vocab_size": 102400},
        "+-" + "+E" * 26,
        {"q_lora_rank": None, "moe_router_pre_softmax": True, "moe_router_num_groups": None, "mscale": 0.707}
        | {"moe_shared_expert_intermediate_size": 2816, "rotary_scaling_factor": 40},
    ),
    "DeepSeek-V2": (
        _DEEPSEEK
        | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "bos_token_id": 100000}
        | {"eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_size": 5120, "intermediate_size": 12288}
        | {"max_position_embeddings": 163840, "moe_intermediate_size": 1536, "n_group": 8, "n_routed_experts": 160}
        | {"n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 128, "num_experts_per_tok": 6}
        | {"num_hidden_layers": 60, "num_key_value_heads": 128, "q_lora_rank": 1536, "rms_norm_eps": 1e-6}
        | {"rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "routed_scaling_factor": 16.0}
        | {"scoring_func": "softmax", "topk_group": 3, "topk_method": "group_limited_greedy", "vocab_size": 102400},
        "+-" + "+E" * 59,
        {"q_lora_rank": 1536, "moe_router_num_groups": 8, "moe_router_group_topk": 3, "moe_router_group_scores": 1}
        | {"moe_router_topk_scaling_factor": 16.0},
    ),
    "DeepSeek-V3 671B": (
        _V3_671B,
        "+-" * 3 + "+E" * 58,
        {"moe_router_enable_expert_bias": True, "moe_router_num_groups": 8, "moe_router_group_topk": 4}
        | {"moe_router_group_scores": 2, "mscale_all_dim": 1.0, "latent_norm_epsilon": 1e-6},
    ),
    "Moonlight 16B": (
        _V3
        | {"bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1, "hidden_size": 2048}
        | {"intermediate_size": 11264, "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "n_group": 1}
        | {"n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 16, "num_experts_per_tok": 6}
        | {"num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "q_lora_rank": None}
        | {"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 50000.0, "routed_scaling_factor": 2.446}
        | {"topk_group": 1, "vocab_size": 163840},
        "+-" + "+E" * 26,
        {"q_lora_rank": None, "norm_epsilon": 1e-5, "latent_norm_epsilon": 1e-6, "moe_router_num_groups": None},
    ),
    "Kimi Linear 48B": (
        {name: value for name, value in _COMMON.items() if not name.startswith("attention")}
        | {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "bos_token_id": 163584}
        | {"eos_token_id": 163586, "first_k_dense_replace": 1, "head_dim": 72, "hidden_size": 2304}
        | {"intermediate_size": 9216, "mla_use_nope": True, "model_max_length": 1048576, "moe_renormalize": True}
        | {"moe_intermediate_size": 1024, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32}
        | {"num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27}
        | {"num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 163839}
        | {"q_lora_rank": None, "rms_norm_eps": 1e-5, "rope_scaling": None, "routed_scaling_factor": 2.446}
        | {"topk_group": 1, "use_grouped_topk": True, "vocab_size": 163840}
        | {
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "head_dim": 128,
                "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            }
        },
        "K-KEKE+E" + "KEKEKE+E" * 5 + "KEKE+E",
        {"position_embedding_type": "none", "kda_num_heads": 32, "kda_conv_kernel_dim": 4, "num_experts": 256}
        | {"latent_norm_epsilon": 1e-6, "norm_epsilon": 1e-5, "moe_router_topk": 8, "v_head_dim": 128},
    ),
    "DeepSeek-V3.2": (
        _V32,
        "D-" * 3 + "DE" * 58,
        {"dsa_indexer_n_heads": 64, "dsa_indexer_head_dim": 128, "dsa_indexer_topk": 2048, "mtp_num_layers": 1}
        | {"dsa_indexer_rope_interleaved": False, "dsa_indexer_scoring_relu": True, "dsa_indexer_topk_freq": 1}
        | {"dsa_indexer_k_norm_epsilon": 1e-6, "moe_router_num_groups": 8, "mscale_all_dim": 1.0},
    ),
    "GLM-5": (
        _GLM5,
        "D-" * 3 + "DE" * 75,
        {"dsa_indexer_n_heads": 32, "dsa_indexer_rope_interleaved": True, "dsa_indexer_topk_freq": 1}
        | {"dsa_indexer_k_norm_epsilon": 1e-6, "norm_epsilon": 1e-5, "moe_router_num_groups": None}
        | {"rotary_base": 1e6, "q_lora_rank": 2048, "latent_norm_epsilon": 1e-6},
    ),
    "GLM-5 with shared choices": (
        _GLM5 | {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        "D-" * 3 + "DE" * 75,
        {"dsa_indexer_topk_freq": 4, "dsa_indexer_skip_topk_offset": 3},
    ),
    "Kimi K2": (_K2, *_READ_K2),
    "Kimi K2 with the range of DeepSeek-V3": (
        _K2 | {"rope_scaling": _K2["rope_scaling"] | {"beta_fast": 32}},
        *_READ_K2,
    ),
}


@pytest.mark.parametrize("what", PUBLISHED)
def test_published_configurations_are_read_and_written(what: str) -> None:
    config, pattern, said = PUBLISHED[what]
    expected = family_of(Path(), config)
    model = expected.model(config)
    assert pattern_of(model.layers) == pattern
    assert {name: getattr(model, name) for name in said} == said
    family, written = choose(FAMILIES, model)
    assert family is expected
    assert pattern_of(family.model(written).layers) == pattern
    assert "refused" not in {fate.kind for fate in expected.key_fates(config)}


REFUSED: dict[str, tuple[str, Json, str]] = {
    "another choice": ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc', but only 'greedy' and"),
    "groups of no number": ("deepseek-v2", {"n_group": None}, "'group_limited_greedy', but there is no n_group"),
    "weights that add up to 1": ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob is True, but only False"),
    "another score": ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax', but only 'sigmoid' is"),
    "another score of Kimi": (
        "kimi-linear",
        {"moe_router_activation_func": "softmax"},
        "moe_router_activation_func is 'softmax', but only 'sigmoid' is",
    ),
    "another choice of V3": ("deepseek-v3", {"topk_method": "greedy"}, "topk_method is 'greedy', but only 'noaux_tc'"),
    "halves that are rotated": ("deepseek-v3", {"rope_interleave": False}, "rope_interleave is False, but only True"),
    "heads in groups": ("deepseek-v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2, but each head has its"),
    "a width that is no sum": ("deepseek-v3", {"qk_head_dim": 11}, "qk_head_dim is 11, but qk_nope_head_dim and"),
    "another rotated width": ("moonlight", {"head_dim": 8}, "head_dim is 8, but qk_rope_head_dim make 4"),
    "half of a growth": (
        "deepseek-v2",
        {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "mscale_all_dim": 1.0}},
        "mscale_all_dim is 1.0 without mscale",
    ),
    "an odd rotated width": (
        "deepseek-v2",
        {"qk_rope_head_dim": 3, "head_dim": 3, "qk_head_dim": 9},
        "3 channels of each head are rotated, but the number must be even",
    ),
    "queries without a latent": ("deepseek-v32", {"q_lora_rank": None}, "q_lora_rank is null: give its value"),
    "an indexer of neighbours": (
        "deepseek-v32",
        {"indexer_rope_interleave": True},
        "indexer_rope_interleave is True, but only False",
    ),
    "an indexer of halves": ("glm-moe-dsa", {"indexer_rope_interleave": False}, "but only True is supported"),
    "layers without sparse attention": (
        "deepseek-v32",
        {"layer_types": ["full_attention"] * 4},
        "layer_types has 'full_attention', which is unknown",
    ),
    "no experts": ("deepseek-v32", {"mlp_layer_types": ["dense"] * 4}, "does not fit 4 layers, some of them with"),
    "a first layer without an indexer": (
        "glm-moe-dsa",
        {"indexer_types": ["shared", "full"] * 2},
        "indexer_types is ['shared', 'full', 'shared', 'full'], but only 'full' for the first layers and then",
    ),
    "indexers at no distance": (
        "glm-moe-dsa",
        {"indexer_types": None, "index_topk_pattern": "FSFF"},
        "indexer_types is ['full', 'shared', 'full', 'full'], but only 'full' for the first layers and then",
    ),
    "an indexer too many": ("glm-moe-dsa", {"indexer_types": ["full"] * 5}, "has 5 entries for 4 layers"),
    "a letter of indexers": (
        "glm-moe-dsa",
        {"indexer_types": None, "index_topk_pattern": "FSFX"},
        "index_topk_pattern has 'X', which is unknown",
    ),
    "no distance": (
        "glm-moe-dsa",
        {"indexer_types": None, "index_topk_freq": 0.5},
        "index_topk_freq is 0.5 and index_skip_topk_offset 2: give whole numbers",
    ),
    "positions": ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope is False, but only True is supported"),
    "prediction": ("kimi-linear", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1, but only 0 is"),
    "layers from 0": (
        "kimi-linear",
        {"layer_types": None, "linear_attn_config": {"kda_layers": [0, 1, 3], "full_attn_layers": [2]}},
        "kda_layers and full_attn_layers do not have each number from 1 to 4 once",
    ),
    "a layer twice": (
        "kimi-linear",
        {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 2, 3, 4], "full_attn_layers": [2]}},
        "do not have each number from 1 to 4 once",
    ),
    "layers of no kind": (
        "kimi-linear",
        {"layer_types": None, "linear_attn_config": None},
        "it has no linear_attn_config and no layer_types",
    ),
    "layers that are nothing": ("kimi-linear", {"linear_attn_config": [1]}, "linear_attn_config [1]"),
    "two lists of layers": ("kimi-linear", {"layer_types": ["full_attention"] * 4}, "linear_attn_config differ"),
    "two sizes of heads": ("kimi-linear", {"linear_head_dim": 7}, "linear_head_dim is 7, and head_dim of linear_attn_"),
    "a key of the layers": (
        "kimi-linear",
        {"linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "of_tomorrow": 1}},
        "of_tomorrow of linear_attn_config is unknown",
    ),
    "two lists of experts": (
        "kimi-linear",
        {"first_k_dense_replace": 2},
        "mlp_layer_types and first_k_dense_replace 2",
    ),
    "two numbers of experts": ("kimi-linear", {"num_experts_per_tok": 3}, "num_experts_per_tok and num_experts_per_to"),
    "quantization of another kind": (
        "deepseek-v3",
        {"quantization_config": {"quant_method": "awq"}},
        "quant_method of quantization_config is 'awq', but only 'fp8' is supported",
    ),
    "other blocks": (
        "deepseek-v3",
        {"quantization_config": _FP8 | {"weight_block_size": [64, 64]}},
        "weight_block_size of quantization_config is [64, 64], but only [128, 128] is supported",
    ),
    "another format": (
        "deepseek-v2",
        {"quantization_config": _FP8 | {"fmt": "e5m2"}},
        "fmt of quantization_config is 'e5m2', but only 'e4m3' or",
    ),
    "a key of quantization": (
        "kimi-linear",
        {"quantization_config": _FP8 | {"of_tomorrow": 1}},
        "of_tomorrow of quantization_config is 1, but only no such key is supported",
    ),
    "blocks of no dtype": (
        "deepseek-v3",
        {"quantization_config": _FP8, "dtype": ["auto"]},
        "torch_dtype is ['auto'], but only bfloat16, float16, float32 are supported",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_megalite_does_not_compute_is_refused(what: str, tmp_path: Path) -> None:
    name, changes, message = REFUSED[what]
    config = theirs.as_written(theirs.make_config(name)) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=re.escape(message)) as raised:
        open_huggingface(tmp_path)
    assert len(str(raised.value)) < 1500


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"index_topk_freq": 1},
        {"index_topk_freq": 0},
        {"index_topk_freq": 4},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"index_topk_freq": 2, "index_skip_topk_offset": 6},
        {"index_topk_freq": 12, "index_skip_topk_offset": 3},
        {"index_topk_freq": 3, "index_skip_topk_offset": 11},
        {"index_topk_pattern": "FFFSSSFSSSFS"},
        {"index_topk_pattern": "F" * 12},
        {"index_topk_pattern": ["full", "shared"] * 6},
        {"indexer_types": ["full"] * 2 + ["shared"] * 10},
    ],
)
def test_layers_without_an_indexer_are_those_of_transformers(said: Json) -> None:
    """Whatever says them. A depth has an indexer in any case."""
    config = theirs.make_config(
        "glm-moe-dsa", {"num_hidden_layers": 12, "indexer_types": None, "mlp_layer_types": None}
    )
    plain = theirs.as_written(config)
    del plain["indexer_types"], plain["layer_types"], plain["mlp_layer_types"]
    family = family_of(Path(), plain)
    expected = [kind == "full" for kind in GlmMoeDsaConfig(**plain, **said).indexer_types]
    model = family.model(plain | said)
    assert [layer.chooses for layer in model.layers] == expected
    written = family.config(model)
    assert [kind == "full" for kind in GlmMoeDsaConfig(**written).indexer_types] == expected
    (of_depth,) = replace(model, mtp_num_layers=1).depth_layers
    assert of_depth.chooses


def test_a_network_of_no_family_is_refused_by_its_flags() -> None:
    model = family_of(Path(), PUBLISHED["Moonlight 16B"][0]).model(PUBLISHED["Moonlight 16B"][0])
    for changes, message in (
        ({"latent_norm_epsilon": None}, "the nearest is deepseek_v3, except --latent-norm-epsilon 1e-05"),
        ({"qk_layernorm": False, "latent_norm_epsilon": None}, "--qk-layernorm False"),
        ({"attention_output_gate": True}, "the nearest is deepseek_v3, except --attention-output-gate True"),
        ({"moe_router_group_topk": 2, "moe_router_num_groups": 8}, "except --moe-router-group-scores 3"),
    ):
        with pytest.raises(CheckpointError, match=message):
            choose(FAMILIES, replace(model, **changes))
    sparse = family_of(Path(), _V32).model(_V32)
    for changes, message in (
        (
            {"dsa_indexer_k_norm_epsilon": 1e-5},
            "the nearest is deepseek_v32, except --dsa-indexer-k-norm-epsilon 1e-05",
        ),
        ({"dsa_indexer_scoring_relu": False}, "the nearest is deepseek_v32, except --dsa-indexer-scoring-relu False"),
        ({"dsa_indexer_topk_freq": 2}, "the nearest is deepseek_v32, except --dsa-indexer-topk-freq"),
    ):
        with pytest.raises(CheckpointError, match=message):
            choose(FAMILIES, replace(sparse, **changes))
    assert choose(FAMILIES, replace(sparse, dsa_indexer_rope_interleaved=True))[0].name == "glm_moe_dsa"


# ------------------------------------------------------------------------------------------------ routers

ROWS, WIDTH = 10_000, 32


def routed(model: ModelConfig, weight: torch.Tensor, bias: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    """Return megalite's weight of each expert for each row, 0 for those that are not chosen."""
    router = Router(model, ParallelContext(ParallelMesh()), 0).eval()
    initialize(router, 1)
    router.weight.data.copy_(weight)
    if bias is not None:
        assert router.expert_bias is not None
        router.expert_bias.values.copy_(bias)
    layout = SequenceLayout.whole(len(hidden))
    found = router(hidden[:, None], LayerContext(None, None, {}, RandomKey(0, ()), layout, layout.runs))
    return torch.zeros(len(hidden), len(weight)).scatter(1, found.experts, found.weights)


def routed_by_theirs(router: nn.Module, weight: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    router.weight.data.copy_(weight)
    _, weights, experts = router(hidden)
    return torch.zeros(len(hidden), len(weight)).scatter(1, experts, weights)


@pytest.mark.parametrize("shift", [0.0, -3.0])
@torch.no_grad()
def test_experts_in_groups_are_those_of_transformers(shift: float) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, WIDTH, generator=generator)
    weight = torch.randn(16, WIDTH, generator=generator) * 0.3
    bias = torch.randn(16, generator=generator) * 0.2 + shift  # all below 0, as scores plus bias then are, too
    for name, kind in (("deepseek-v2", DeepseekV2TopkRouter), ("deepseek-v3", DeepseekV3TopkRouter)):
        sizes = {"hidden_size": WIDTH, "n_routed_experts": 16, "first_k_dense_replace": 0, "num_experts_per_tok": 4}
        config = theirs.make_config(name, sizes | {"n_group": 4, "topk_group": 2})
        model = family_of(Path(), theirs.as_written(config)).model(theirs.as_written(config))
        other = kind(config)
        if name == "deepseek-v3":
            other.e_score_correction_bias.copy_(bias)
        expected = routed_by_theirs(other, weight, hidden)
        found = routed(model, weight, bias if name == "deepseek-v3" else None, hidden)
        assert torch.equal(found > 0, expected > 0)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
        scores = 2 if name == "deepseek-v2" else 1
        mistaken = routed(replace(model, moe_router_group_scores=scores), weight, bias if scores == 1 else None, hidden)
        assert ((mistaken > 0) != (expected > 0)).any(1).sum() > ROWS / 100


# ------------------------------------------------------------------------------------------------ other forms


def test_dense_layers_that_transformers_has_renamed_are_read(tmp_path: Path) -> None:
    expected = theirs.logits(theirs.save(tmp_path, "kimi-linear"), theirs.tokens())
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.weight" in tensors
    theirs.make_model(theirs.make_config("kimi-linear")).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.up_proj.weight" in saved
    assert (logits(open_huggingface(tmp_path), theirs.tokens()) - expected).abs().max() <= LOGITS
    save_file(saved | {"model.layers.0.mlp.up_proj.weight": torch.ones(40, 24)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has model\.layers\.0\.mlp\.up_proj\.weight twice"):
        open_huggingface(tmp_path)


def test_kinds_of_layers_may_be_lists_alone(tmp_path: Path) -> None:
    config = theirs.as_written(theirs.make_config("kimi-linear"))
    family = family_of(tmp_path, config)
    alone = {name: value for name, value in config.items() if name != "linear_attn_config"}
    assert family.model(alone) == family.model(config)
    mixed = alone | {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}
    assert pattern_of(family.model(mixed).layers) == "KEK-+EKE"
    assert family.config(family.model(mixed))["mlp_layer_types"] == mixed["mlp_layer_types"]
    assert "mlp_layer_types" not in family.config(family.model(alone))


def with_depths(folder: Path, depths: int, name: str = "deepseek-v3") -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Write a folder with layers that predict further tokens. Return its tensors, and the logits of transformers."""
    expected = theirs.logits(theirs.save(folder, name), theirs.tokens())
    return theirs.add_prediction_layers(folder, depths), expected


def write_out(opened: OpenedModel, folder: Path) -> str:
    return write_huggingface(opened, folder, dtype=None, shard=10**9, workers=1, advance=lambda _: None).name


WITH_DEPTHS = [("deepseek-v3", 1), ("deepseek-v3", 2), ("moonlight", 1), ("deepseek-v32", 2), ("glm-moe-dsa", 1)]


@pytest.mark.wide_except("deepseek-v3-1")
@pytest.mark.parametrize(("name", "depths"), WITH_DEPTHS)
def test_depths_are_read_and_written_bit_for_bit(name: str, depths: int, tmp_path: Path) -> None:
    tensors, expected = with_depths(tmp_path / "theirs", depths, name)
    opened = open_huggingface(tmp_path / "theirs")
    assert opened.config.mtp_num_layers == depths
    assert opened.notes == ()
    write_megalite(opened, tmp_path / "run", dtype=None, layout=None, workers=1, advance=lambda _: None)
    native = open_megalite(tmp_path / "run")
    assert without_unknown_depths(native) is native
    families = {"deepseek-v32": "deepseek_v32", "glm-moe-dsa": "glm_moe_dsa"}
    assert write_out(native, tmp_path / "ours") == families.get(name, "deepseek_v3")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["num_nextn_predict_layers"] == depths
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(values, tensors[key]) for key, values in written.items())
    agreement = verify(open_huggingface(tmp_path / "ours"), opened)
    assert agreement.different == ()
    assert agreement.transformers is not None
    assert agreement.transformers <= LOGITS
    loaded, info = theirs.load(tmp_path / "ours")
    assert info["missing_keys"] == info["mismatched_keys"] == set()
    assert (theirs.logits(loaded, theirs.tokens()) - expected).abs().max() <= LOGITS


def losses_of_depths(opened: OpenedModel, tokens: torch.Tensor) -> TermSums:
    """Return the sums of megalite's losses."""
    mesh = ParallelMesh()
    network = GPT(opened.config, mesh).eval()
    load_weights(opened.source, opened.what, network, None, mesh)
    tokens, labels = tokens[:, :-1], tokens[:, 1:]
    mask, positions = torch.ones(labels.shape), torch.arange(labels.shape[1]).expand_as(labels)
    further = FurtherTokens(*further_tokens(tokens, labels, mask, None, opened.config.depths))
    batch = MicroBatch(tokens, positions, None, labels, mask, RandomKey(0, ()), further=further)
    with torch.no_grad():
        return network({}, batch).terms


@pytest.mark.wide_except("moonlight", "deepseek-v32")
@pytest.mark.parametrize("name", ["deepseek-v3", "moonlight", "deepseek-v32"])
def test_depths_compute_what_those_of_transformers_do(name: str, tmp_path: Path) -> None:
    """Each reads the hidden states behind the final norm of the one before it, and the embedding comes first."""
    tensors, _ = with_depths(tmp_path, 2, name)
    tokens = theirs.tokens()
    found = losses_of_depths(open_huggingface(tmp_path), tokens)
    for depth, predicted in enumerate(theirs.logits_of_depths(tmp_path, 2, tokens), start=1):
        labels = tokens[:, depth + 1 :]
        expected = cross_entropy(predicted[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")
        torch.testing.assert_close(found[f"mtp_{depth}_loss"], expected, rtol=1e-6, atol=0.0)
    before = tensors["model.norm.weight"]
    save_file(tensors | {"model.norm.weight": before.flip(0)}, tmp_path / "model.safetensors")
    other = losses_of_depths(open_huggingface(tmp_path), tokens)
    assert (other["mtp_1_loss"] - found["mtp_1_loss"]).abs() > MATTERS * found["mtp_1_loss"]


def test_a_run_trains_the_depths_of_a_converted_folder(tmp_path: Path, spawn: Callable[..., Job]) -> None:
    with_depths(tmp_path / "hf", 1)
    folders = ["--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "run"]
    assert run_tool("convert", "--loader", "hf", "--saver", "megalite", *folders).code == 0
    flags = "--use-checkpoint-args --finetune --mock-data --tokenizer-type NullTokenizer --vocab-size 66 --no-report "
    flags += "--seq-length 16 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --train-iters 3 --eval-iters 0"
    run = ["--log-interval", 1, "--load", tmp_path / "run", "--save", tmp_path / "out"]
    job = spawn([PRETRAIN, *flags.split(), *run], 1)
    assert job.wait() == [0], job.stderr(0)
    lines = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    losses = [line["mtp_1_loss"] for line in lines if "lm_loss" in line]
    assert len(losses) == 3
    assert all(map(math.isfinite, losses))
    run = ["--log-interval", 1, "--load", tmp_path / "hf", "--save", tmp_path / "alone", "--mtp-num-layers", 0]
    job = spawn([PRETRAIN, *flags.replace("--use-checkpoint-args", "").split(), *run], 1)
    assert job.wait() == [0], job.stderr(0)
    assert "--finetune leaves out its depths (1)" in job.stdout(0)
    assert "mtp_1_loss" not in (tmp_path / "alone" / "metrics.jsonl").read_text()


def test_a_depth_of_a_folder_is_whole_and_has_copies_that_are_the_same(tmp_path: Path) -> None:
    tensors, _ = with_depths(tmp_path, 2)
    for name, of in (("4.embed_tokens", "model.embed_tokens"), ("5.shared_head.head", "lm_head")):
        copy = f"model.layers.{name}.weight"
        save_file(tensors | {copy: tensors[copy] + 1}, tmp_path / "model.safetensors")
        message = f"has {copy} and {of}.weight with different values"
        with pytest.raises(CheckpointError, match=re.escape(message)):
            open_huggingface(tmp_path)
        save_file(tensors | {copy: tensors[copy].bfloat16()}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=re.escape(message)):
            open_huggingface(tmp_path)
    for name in ("4.hnorm.weight", "5.eh_proj.weight", "5.mlp.experts.3.up_proj.weight"):
        lacking = {key: values for key, values in tensors.items() if key != f"model.layers.{name}"}
        save_file(lacking, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"model\.layers\.{re.escape(name)} is missing"):
            open_huggingface(tmp_path)
    more = tensors | {"model.layers.5.of_tomorrow.weight": torch.zeros(2)}
    save_file(more, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"deepseek_v3 does not have: model\.layers\.5\.of_tomorrow"):
        open_huggingface(tmp_path)
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    alone = {key: values for key, values in tensors.items() if not (key.startswith("model.l") and key.endswith(copies))}
    save_file(alone, tmp_path / "model.safetensors")
    assert open_huggingface(tmp_path).config.mtp_num_layers == 2


def test_depths_are_left_out_where_none_are_asked_for(tmp_path: Path) -> None:
    """Then it does not matter what copies they have."""
    tensors, expected = with_depths(tmp_path, 1)
    copy = "model.layers.4.embed_tokens.weight"
    save_file(tensors | {copy: tensors[copy] + 1}, tmp_path / "model.safetensors")
    generating = open_model(tmp_path).opened
    assert generating is not None
    assert not generating.config.depths
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 0}))
    training = open_huggingface(tmp_path)
    for opened in (generating, training):
        assert (logits(opened, theirs.tokens()) - expected).abs().max() <= LOGITS
    (note,) = training.notes
    assert note.endswith("that predict further tokens (MTP), such as model.layers.4.eh_proj.weight: they are left out")


def test_depths_that_are_only_in_the_config_are_left_out_with_a_note(tmp_path: Path) -> None:
    expected = theirs.logits(theirs.save(tmp_path, "deepseek-v3", {"num_nextn_predict_layers": 1}), theirs.tokens())
    opened = open_huggingface(tmp_path)
    assert opened.config.mtp_num_layers is None
    (note,) = opened.notes
    assert note == (f"note: {tmp_path} has no tensors of layers that predict further tokens (MTP): it is read without")
    assert (logits(opened, theirs.tokens()) - expected).abs().max() <= LOGITS


def test_depths_that_no_family_has_are_not_written(tmp_path: Path) -> None:
    with_depths(tmp_path, 2)
    opened = open_huggingface(tmp_path)
    for changes in ({"mtp_use_repeated_layer": True}, {"multi_latent_attention": False, "hidden_size": 32}):
        kept = without_unknown_depths(replace(opened, config=replace(opened.config, **changes)))
        assert kept.config.mtp_num_layers is None
        assert re.fullmatch(r"note: \d+ tensors of depths that predict further tokens are left out", kept.notes[-1])


def test_a_folder_of_kimi_k2_is_read_and_verified_without_transformers(tmp_path: Path) -> None:
    expected = theirs.logits(theirs.save(tmp_path / "theirs", "moonlight"), theirs.tokens())
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2"}))
    opened = open_huggingface(tmp_path / "theirs")
    assert (logits(opened, theirs.tokens()) - expected).abs().max() <= LOGITS
    family = write_huggingface(opened, tmp_path / "ours", dtype=None, shard=10**9, workers=1, advance=lambda _: None)
    assert family.name == "deepseek_v3"
    agreement = verify(open_huggingface(tmp_path / "ours"), opened)
    assert agreement.different == ()
    assert agreement.transformers is None
    agreement = verify(opened, open_huggingface(tmp_path / "ours"))
    assert agreement.transformers is not None
    assert agreement.transformers <= LOGITS

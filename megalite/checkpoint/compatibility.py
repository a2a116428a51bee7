"""Check that a checkpoint holds the network that a run describes.

Equal shapes are not sufficient: two networks with equal shapes can compute different functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar, get_type_hints

from megalite.config.fields import named
from megalite.config.kinds.attention import OF_ATTENTION
from megalite.config.kinds.sparse_attention import without_indexers
from megalite.config.layer_specs import NEXT_STAGE, pattern_of
from megalite.config.model import ModelConfig, as_gpt
from megalite.config.run import fields_by_name, fits, section_types
from megalite.config.validate_model import model_problems
from megalite.errors import CheckpointError, CorruptCheckpointError
from megalite.small_files import shown
from megalite.storage import AnyPath

Section = TypeVar("Section")

# Fields that change the training or the layout, but not the function that the weights compute.
NOT_THE_FUNCTION = {
    *("init_method_std", "hidden_dropout", "attention_dropout", "make_vocab_size_divisible_by"),
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"),
    "moe_router_quantile_balancing_ema",
    *("moe_expert_capacity_factor", "moe_token_drop_policy", "moe_pad_expert_input_to_capacity"),
    *("moe_token_dispatcher_type", "moe_router_dtype", "moe_shared_expert_overlap"),
    *("mtp_loss_scaling_factor", "mtp_detach_heads"),
    *("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss", "dsa_stage"),
    *("mamba_chunk_size", "linear_chunk_size", "kda_chunk_size", "apply_wd_to_qk_layernorm"),
    *("qk_clip", "qk_clip_alpha", "qk_clip_threshold", "log_max_attention_logit"),
}

_CHOOSING = "dsa_indexer_topk_freq"
_NOT_OF_INDEXERS = {*NOT_THE_FUNCTION, "dsa_indexer_skip_topk_offset"}
_OF_ROTARY = [
    *("position_embedding_type", "rotary_base", "window_rotary_base", "rotary_seq_len_interpolation_factor"),
    *("use_rope_scaling", "rotary_scaling_factor", "mscale", "mscale_all_dim"),
    *(f.name for f in fields(ModelConfig) if f.name.startswith(("rope_scaling_", "yarn_"))),
]
_OF_PATTERN = ("num_layers", "moe_layer_freq", "hybrid_layer_pattern")


def model_config(path: AnyPath, config: Mapping[str, Any], own: ModelConfig | None = None) -> ModelConfig:
    """Return the network's configuration from `config`, the saved configuration of the run, by section.

    `own`: the network of this run, which is returned if it is saved as the same. Raises CheckpointError if this
    version of megalite does not support the network.
    """
    if own is not None and config.get("model") == json.loads(json.dumps(asdict(own))):
        return own
    unknown = sorted(set(config.get("model", ())) - {field.name for field in fields(ModelConfig)})
    if unknown:
        raise CheckpointError(f"{path} has a model with {', '.join(unknown)[:200]}, unknown here: use a newer megalite")
    model = saved_section(path, config, ModelConfig)
    if model.hybrid_layer_pattern is not None:  # earlier versions saved the stages with it
        model = replace(model, hybrid_layer_pattern=model.hybrid_layer_pattern.replace(NEXT_STAGE, ""))
    if problems := model_problems(model):
        raise CorruptCheckpointError("\n".join((f"{path} describes an impossible model:", *problems)))
    return model


def saved_section(path: AnyPath, config: Mapping[str, Any], kind: type[Section]) -> Section:
    """Return a section of the saved configuration of the run, from the checkpoint in folder `path`.

    Fields of another version of megalite are ignored; fields that are missing get their defaults. Raises
    CorruptCheckpointError if a required field is missing, or if a value is not possible for its field.
    """
    (name,) = (name for name, each in section_types().items() if each is kind)
    kinds, saved = get_type_hints(kind), config.get(name, {})
    values = {each: saved[each] for each in kinds if each in saved}
    wrong = [f"{each} {shown(value)}" for each, value in values.items() if not fits(value, kinds[each])]
    required = {each for each, place in fields_by_name().items() if place.required and place.section == name}
    wrong += [f"no {each}" for each in sorted(required - values.keys())]
    if wrong:
        raise CorruptCheckpointError(
            f"{path} has a wrong configuration, in the section {name}: {', '.join(wrong[:8])}. It is damaged, or "
            "from a newer megalite: load another checkpoint"
        )
    return kind(**{each: tuple(value) if isinstance(value, list) else value for each, value in values.items()})


def same_depths(saved: ModelConfig, model: ModelConfig) -> bool:
    """Tell whether two networks have the same depths of multi-token prediction, but for indexers."""
    functions = map(function_of, map(without_indexers, (saved, model)))
    theirs, ours = ({name: f[name] for name in f if name.startswith("mtp_")} for f in functions)
    return theirs == ours


def indexers_agree(saved: ModelConfig, model: ModelConfig) -> bool:
    """Tell whether indexers that both of two networks have give the same scores; true if one has none."""
    given = [_of_indexers(each) for each in (saved, model)]
    theirs, ours = ({**each, _CHOOSING: None, "dsa_indexer_topk": None} for each in given)
    return theirs == ours or None in [each["dsa_indexer_topk"] for each in given]


def with_rotary_of(saved: ModelConfig, model: ModelConfig) -> tuple[ModelConfig, str]:
    """Return `saved` with the base and scaling of the rotary embeddings of `model`, and the differences in words.

    Nothing is changed if one of the two has other positions than rotary embeddings. These have no weights, so a
    checkpoint fits any of them.
    """
    if {saved.position_embedding_type, model.position_embedding_type} - {"rope", "yarn"}:
        return saved, ""
    other = replace(saved, **{name: getattr(model, name) for name in _OF_ROTARY})
    theirs, ours = function_of(saved), function_of(other)
    different = [
        name for name in _OF_ROTARY if theirs[name] != ours[name] and getattr(saved, name) != getattr(other, name)
    ]
    return other, ", ".join(f"{name} {getattr(saved, name)} -> {getattr(other, name)}" for name in different)


def check_compatible(path: AnyPath, config: Mapping[str, Any], model: ModelConfig) -> None:
    """Raise CheckpointError if the network in the checkpoint does not compute the same function as `model`.

    The error lists each difference. `config` is the configuration, by section, of the run that saved the checkpoint in
    folder `path`.
    """
    check_same_function(str(path), model_config(path, config, model), model)


def check_same_function(what: str, saved: ModelConfig, model: ModelConfig) -> None:
    """Raise CheckpointError, listing each difference, if `saved`, the network of `what`, differs from `model`."""
    if saved == model:
        return
    theirs, ours = function_of(saved), function_of(model)
    if as_gpt(saved).hybrid_layer_pattern is None:  # a GPT's goes on in any order, as Megatron-LM pairs layers
        ours = function_of(as_gpt(model, in_any_order=True))
    different = [name for name in ours if theirs[name] != ours[name]]
    if different:
        if (saved.hybrid_layer_pattern, model.hybrid_layer_pattern) != (None, None):  # which says all of these
            theirs, ours = (
                {"hybrid_layer_pattern": pattern_of(network.layers)}
                | {name: value for name, value in values.items() if name not in _OF_PATTERN}
                for values, network in ((theirs, saved), (ours, model))
            )
            different = [name for name in ours if theirs[name] != ours[name]]
        lines = [f"  {name}: {theirs[name]} in the checkpoint, {ours[name]} in this run" for name in different]
        if any(name.startswith("mtp_") for name in different):
            lines.append("  (--finetune leaves out the depths of the checkpoint, and begins those of the run anew)")
        if _CHOOSING in different:
            lines.append("  (--finetune leaves out indexers that the run lacks, and begins those that it adds anew)")
        elif "dsa_indexer_topk" in different:
            lines.append("  (--finetune goes on with indexers that choose another number of keys)")
        if {*different} <= {*_OF_ROTARY} and with_rotary_of(saved, model)[1]:
            lines.append("  (--allow-changed-rotary goes on with other rotary embeddings, as for longer samples)")
        raise CheckpointError(
            "\n".join([f"{what} is from another model; give the flags it was trained with, or load another:", *lines])
        )


def function_of(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that decide which function the network computes, by name, with defaults filled in.

    Fields without an effect on this network are set to None or left out. A pattern that is a GPT counts as this.
    """
    model = as_gpt(model)
    values = {f.name: getattr(model, f.name) for f in fields(model) if f.name not in NOT_THE_FUNCTION}
    values |= {"ffn_hidden_size": model.ffn_size if model.has_dense_layers else None}
    values |= {"kv_channels": model.head_dim, "num_query_groups": model.kv_groups}
    values["add_qkv_bias"] = model.add_bias_linear or model.add_qkv_bias
    values["mamba_num_heads"] = model.mamba_heads
    values["query_pre_attn_scalar"] = model.query_pre_attn_scalar or model.head_dim
    values |= dict.fromkeys(("experimental_attention_variant", "linear_attention_freq", "multi_latent_attention"))
    letters = pattern_of(model.layers)
    if model.hybrid_layer_pattern is not None or any(layer.mixer != "attention" for layer in model.layers):
        values |= {"hybrid_layer_pattern": letters, "num_layers": len(letters)}
    windows = [layer.keys_before for layer in model.layers if layer.mixer == "attention"]
    values["window_size"] = None if model.window_size is None else windows
    if model.window_size is None:
        values["window_rotary_base"] = None
    unrotated = [not layer.rotary for layer in model.layers if layer.mixer == "attention"]
    values["no_rope_freq"] = unrotated if model.rotary and any(unrotated) else None
    behind = [layer.output_norm for layer in model.layers for _ in layer.kinds]
    values["output_norm_freq"] = behind if any(behind) else None
    epsilon = model.norm_epsilon if model.linear_norm_epsilon is None else model.linear_norm_epsilon
    values["linear_norm_epsilon"] = epsilon if "gated_delta" in model.kinds else None
    if model.has_latents:
        epsilon = model.norm_epsilon if model.latent_norm_epsilon is None else model.latent_norm_epsilon
        values["latent_norm_epsilon"] = epsilon if model.qk_layernorm else None
    values |= _of_indexers(model)
    values["mtp_hybrid_override_pattern"] = pattern_of(model.depth_layers) or None
    values["mtp_use_repeated_layer"] = model.own_depths < model.depths
    del values["group_query_attention"], values["window_attn_skip_freq"], values["dsa_indexer_skip_topk_offset"]
    if not model.rotary:
        values |= dict.fromkeys(name for name in values if name.startswith("rotary_"))
        values |= dict.fromkeys(("window_rotary_base", "use_rope_scaling"))
    if not values["use_rope_scaling"]:
        values |= dict.fromkeys(name for name in values if name.startswith("rope_scaling_"))
    if not model.has_attention:
        values |= dict.fromkeys(each for each in named(model, f"num_attention_heads {OF_ATTENTION}") if each in values)
    if model.position_embedding_type != "yarn":
        yarn = [name for name in values if name.startswith("yarn_")]
        values |= dict.fromkeys([*yarn, "rotary_scaling_factor", "mscale", "mscale_all_dim"])
    elif model.yarn_attention_factor is not None:
        values["mscale"] = None
        if not model.has_latents:  # whose scores it also scales
            values["mscale_all_dim"] = None
    values["moe_router_load_balancing_type"] = "quantile_balancing" if model.balances_by_quantiles else "another"
    values["moe_layer_freq"] = [kind == "moe" for layer in model.layers for kind in layer.kinds]
    if model.num_experts is None:
        values |= dict.fromkeys(name for name in values if name.startswith("moe_"))
    else:
        values["moe_ffn_hidden_size"] = model.expert_ffn_size
        values["moe_router_group_scores"] = model.routing_group_scores
        values["moe_router_topk_scaling_factor"] = model.topk_scaling_factor
    if model.position_embedding_type != "learned_absolute":
        values["max_position_embeddings"] = None
    return values


def _of_indexers(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of indexers that decide which keys are chosen, and which layers have one."""
    names = [f.name for f in fields(model) if f.name.startswith("dsa_") and f.name not in _NOT_OF_INDEXERS]
    if "sparse_attention" not in model.kinds:
        return dict.fromkeys(names)
    epsilon = model.norm_epsilon if model.dsa_indexer_k_norm_epsilon is None else model.dsa_indexer_k_norm_epsilon
    return {name: getattr(model, name) for name in names} | {
        _CHOOSING: [layer.chooses for layer in model.layers if layer.mixer == "sparse_attention"],
        "dsa_indexer_rope_interleaved": model.dsa_indexer_rope_interleaved if model.rotary else None,
        "dsa_indexer_k_norm_epsilon": epsilon,
    }

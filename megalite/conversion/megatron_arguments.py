"""Megatron-LM's arguments, as its checkpoints contain them, and the network that they describe."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args, get_type_hints

from megalite.checkpoint.compatibility import function_of
from megalite.config import ModelConfig, megatron_flags
from megalite.config.activations import ACTIVATIONS, flags_by_megatron, megatron_of
from megalite.config.run import fields_by_name, fits
from megalite.config.tokenizer import TokenizerFlags, TokenizerType
from megalite.config.validate_model import model_problems, number_problems, with_router_weights
from megalite.conversion.folder_keys import NULL, KeyFate
from megalite.conversion.megatron_layers import (
    LAYER_ARGUMENTS,
    NO_NETWORK,
    arguments_of_layers,
    as_text,
    is_of_pattern,
    layer_problems,
    layers_in,
    pattern_in,
    with_rotation,
)
from megalite.errors import CheckpointError
from megalite.small_files import shown

_SAME = """num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels group_query_attention
    max_position_embeddings rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor
    use_rope_scaling rope_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
    yarn_correction_range_round_to_int norm_epsilon apply_layernorm_1p qk_layernorm
    add_bias_linear add_qkv_bias untie_embeddings_and_output_weights make_vocab_size_divisible_by init_method_std
    hidden_dropout attention_dropout normalization position_embedding_type attention_output_gate
    softmax_type glu_linear_offset activation_func_clamp_value"""
"""Fields of ModelConfig that have the same name as an argument."""
_OF_EXPERTS = """num_experts moe_ffn_hidden_size moe_router_topk moe_router_score_function moe_router_pre_softmax
    moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor moe_router_enable_expert_bias
    moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_dtype moe_router_bias_update_rate
    moe_latent_size"""
"""Further fields of this kind, which have a meaning only if there are experts."""
_OTHER_NAMES = {
    "num_layers": "encoder_num_layers",
    "norm_epsilon": "layernorm_epsilon",
    "rotary_scaling_factor": "yarn_rotary_scaling_factor",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
}
"""Other names of arguments, by field: those of older versions, and those for YaRN."""
_WITHOUT_LOSS = ("sinkhorn", "quantile_balancing")
_SWITCHES_AND_COUNTS = """qk_l2_norm apply_residual_connection_post_layernorm mtp_hsm is_hybrid_model
    use_mup retro_add_retriever moe_apply_probs_on_input"""
_CHOICES = """softmax_scale mrope_section heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json
    spec"""
_NOT_OURS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(_SWITCHES_AND_COUNTS.split(), (None, False)),  # 0 equals False
    **dict.fromkeys(_CHOICES.split(), (None,)),
}
"""Arguments for parts of a network that megalite does not have, with the values for which they have no effect.

All other arguments that are not fields describe the run, not the network. If one of them adds tensors to the network,
the check of the tensors finds this.
"""
_FURTHER = """num_query_groups disable_bias_linear use_rotary_position_embeddings add_position_embedding
    moe_layer_freq moe_router_load_balancing_type bias_gelu_fusion openai_gelu vocab_size seq_length"""
"""Arguments that are read beside fields."""
_COMPUTED = """apply_rope_fusion bert_binary_head consumed_train_bins consumed_train_samples consumed_valid_samples
    cpu_offloading data_parallel_size expert_gtp_weight_remat_size fp4 fp8 grpo_samples_per_iteration
    gtp_weight_remat_size inference_dynamic_batching_enable_prefix_caching iteration logit_dtype muon_split_qkv
    num_floating_point_operations_so_far offset_sampling_seed_by_dp_rank overlap_p2p_comm padded_vocab_size params_dtype
    rank skipped_train_samples torch_fsdp2_reshard_after_forward transformer_pipeline_model_parallel_size
    use_gloo_process_groups use_layer_wise_distributed_optimizer variable_seq_lengths
    virtual_pipeline_model_parallel_size world_size"""
"""Arguments of the run that are no flags, or have another name than their flag."""
_TOKENIZER = "tokenizer_type tokenizer_model vocab_file merge_file"
_OF_THE_RUN = "describes that run, not the network: a new run has its own flags"
_UNKNOWN = "unknown to megalite, and taken to describe that run, not the network"
_SHOWN = 8
_TIKTOKEN = "tiktoken_pattern tiktoken_num_special_tokens tokenizer_special_tokens"


def model_of(arguments: Mapping[str, Any]) -> ModelConfig:
    """Return the network that a checkpoint's arguments describe, without the size of its vocabulary.

    Raises CheckpointError, listing each argument that describes a network which megalite does not have.
    """
    unknown = {name: arguments[name] for name in _NOT_OURS if not _is_off(name, arguments)}
    values: dict[str, Any] = {}
    for name in {**dict.fromkeys(_SAME.split()), **_OTHER_NAMES}:
        for argument in (_OTHER_NAMES.get(name, name), name):
            if arguments.get(argument) is not None:
                values[name] = arguments[argument]
    if values.get("group_query_attention"):
        values["num_query_groups"] = arguments.get("num_query_groups", 1)
    if arguments.get("disable_bias_linear") is not None:
        values["add_bias_linear"] = not arguments["disable_bias_linear"]
    if arguments.get("use_rotary_position_embeddings"):
        values["position_embedding_type"] = "rope"
    kind = values.get("position_embedding_type", "learned_absolute")
    if kind == "learned_absolute" and arguments.get("add_position_embedding") is False:
        values["position_embedding_type"] = "none"
    values |= _experts(arguments)
    values |= layers_in(arguments)
    kinds = arguments.get("moe_router_load_balancing_type")
    if values.get("num_experts") and kinds in _WITHOUT_LOSS:
        values["moe_router_load_balancing_type"] = (kinds,)
    elif values.get("num_experts") and isinstance(kinds, list) and set(_WITHOUT_LOSS) & set(kinds):
        unknown |= {"moe_router_load_balancing_type": kinds}
    values |= flags_by_megatron(arguments, biases=values.get("add_bias_linear", True))
    hints = get_type_hints(ModelConfig)
    unknown |= {name: value for name, value in values.items() if not fits(value, hints[name])}
    problems = [f"  --{name.replace('_', '-')} {shown(value)}: {NO_NETWORK}" for name, value in unknown.items()]
    problems += [
        f"  --{name.replace('_', '-')} is missing"
        for name in ("num_layers", "hidden_size", "num_attention_heads")
        if name not in values
    ]
    if problems:
        raise CheckpointError("\n".join(problems))
    model = with_router_weights(ModelConfig(**values))
    if impossible := number_problems(model):
        raise CheckpointError("\n".join(f"  {problem}" for problem in impossible))
    model = with_rotation(model, arguments.get("rope_type"))
    if model.rotary and model.use_rope_scaling and model.rotary_seq_len_interpolation_factor not in (None, 1):
        problems.append("  --use-rope-scaling with --rotary-seq-len-interpolation-factor: megalite has one scaling")
    if model.rotary_interleaved and model.position_embedding_type == "yarn":
        problems.append("  --rotary-interleaved with --position-embedding-type yarn: Megatron-LM has no such network")
    if model.num_experts is not None and model.add_bias_linear:
        problems.append("  --num-experts with --add-bias-linear: biases of experts and routers are not converted")
    problems = problems or [f"  {problem}" for problem in model_problems(model)]
    problems = problems or [f"  {problem}" for problem in layer_problems(model)]
    if problems:
        raise CheckpointError("\n".join(problems))
    return model


def _is_off(name: str, arguments: Mapping[str, Any]) -> bool:
    """Tell whether an argument of `_NOT_OURS` has a value with which it has no effect."""
    value = arguments.get(name)
    if value in _NOT_OURS[name]:
        return True
    return pattern_in(arguments) is not None and is_of_pattern(name, value)


def argument_fates(arguments: Mapping[str, Any]) -> Iterator[KeyFate]:
    """Yield the fate of each argument of a checkpoint."""
    used = {*_SAME.split(), *_OF_EXPERTS.split(), *_FURTHER.split(), *_OTHER_NAMES, *_OTHER_NAMES.values()}
    used |= LAYER_ARGUMENTS
    used |= {*_TOKENIZER.split(), *_TIKTOKEN.split(), *(row.megatron or "" for row in ACTIVATIONS)}
    for name, value in sorted(arguments.items()):
        if name in _NOT_OURS:
            off = _is_off(name, arguments)
            yield KeyFate(name, "noted" if off else "refused", "off" if off else f"{shown(value)}: {NO_NETWORK}")
        elif value is None:
            yield KeyFate(name, "noted", NULL)
        elif name in used:
            yield KeyFate(name, "used", shown(value))
        else:
            yield KeyFate(name, "noted", _OF_THE_RUN if _is_of_the_run(name) else f"{_UNKNOWN}: {shown(value)}")


def unknown_arguments(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note on the arguments that no table knows; none if there are no such, or they are off."""
    fates = argument_fates({name: value for name, value in arguments.items() if value not in (False, [], "")})
    if not (unknown := [fate.key[:80] for fate in fates if fate.why.startswith(_UNKNOWN)]):
        return ()
    more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
    return (f"note: the arguments {', '.join(unknown[:_SHOWN])}{more} of the checkpoint are {_UNKNOWN}",)


def _is_of_the_run(name: str) -> bool:
    """Tell whether an argument belongs to a flag of Megatron-LM that describes no network, or is computed from such."""
    bare = re.sub(r"^(no|disable|use|enable)_|_deprecated$", "", name.lstrip("_"))
    return bool({name, bare} & _flags_of_runs())


@cache
def _flags_of_runs() -> set[str]:
    flags = {name.replace("-", "_") for name in megatron_flags.names()}
    bare = {re.sub(r"^(no|disable|use|enable)_", "", name) for name in flags}
    return {*_COMPUTED.split(), *flags, *bare, *fields_by_name()}


def _experts(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for layers with experts. `moe_layer_freq` is N, or a list of 0, 1."""
    if not arguments.get("num_experts"):
        return {}
    given = {name: arguments[name] for name in _OF_EXPERTS.split() if arguments.get(name) is not None}
    layers = arguments.get("moe_layer_freq")
    if layers in (None, 1) or pattern_in(arguments) is not None:
        return given
    return given | {"moe_layer_freq": as_text(layers)}


def vocabulary_of(arguments: Mapping[str, Any]) -> int | None:
    """Return the number of tokens in the vocabulary without padding; None if the arguments do not have it."""
    size = count_of(arguments, "vocab_size")
    return None if size is None else size + _more_tokens(arguments.get("tokenizer_type"))


def count_of(arguments: Mapping[str, Any], name: str) -> int | None:
    """Return an argument if it is an integer above 0 and within bounds; otherwise None."""
    value = arguments.get(name)
    return value if type(value) is int and 0 < value <= 2**53 else None


def _more_tokens(tokenizer: object) -> int:
    """Return the number of tokens that --vocab-size does not count: the end-of-document token of a NullTokenizer."""
    return 1 if tokenizer == "NullTokenizer" else 0


def tokenizer_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that name the tokenizer; empty if megalite does not have it."""
    kind = arguments.get("tokenizer_type")
    if kind not in get_args(TokenizerType):
        return {}
    names = _TOKENIZER if kind != "TikTokenizer" else f"{_TOKENIZER} {_TIKTOKEN}"
    hints = get_type_hints(TokenizerFlags)
    found = {name: value for name in names.split() if (value := arguments.get(name)) is not None}
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return {name: value for name, value in found.items() if fits(value, hints[name])}


def arguments_of(
    model: ModelConfig, data: Mapping[str, Any], sequence_length: int | None, padded_vocabulary: int
) -> Namespace:
    """Return the arguments that describe a network to Megatron-LM, for its --use-checkpoint-args.

    Raises CheckpointError, listing each flag that Megatron-LM does not support, if no arguments can describe it.
    """
    arguments: dict[str, Any] = {name: getattr(model, name) for name in _SAME.split()}
    arguments |= {other: getattr(model, name) for name, other in _OTHER_NAMES.items()}
    arguments |= {
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_dim,
        "num_query_groups": model.num_query_groups,
        **megatron_of(model.activation),
        "add_position_embedding": True,
        "use_rotary_position_embeddings": model.position_embedding_type == "rope",
        "seq_length": sequence_length or model.max_position_embeddings,
        "max_position_embeddings": model.max_position_embeddings or sequence_length,
        "vocab_size": (model.vocab_size or 0) - _more_tokens(data.get("tokenizer_type")),
        "padded_vocab_size": padded_vocabulary,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "world_size": 1,
        "data_parallel_size": 1,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "no_save_optim": True,
        "no_save_rng": True,
        "ckpt_format": "torch_dist",
    }
    arguments |= {name: data.get(name) for name in f"{_TOKENIZER} {_TIKTOKEN}".split()}
    if model.num_experts is not None:
        with_experts = [int(layer.feed_forward == "moe") for layer in model.layers]
        arguments |= {name: getattr(model, name) for name in _OF_EXPERTS.split()}
        if model.balances_by_quantiles:
            arguments["moe_router_load_balancing_type"] = "quantile_balancing"
        arguments |= {
            "moe_ffn_hidden_size": model.expert_ffn_size,
            "moe_layer_freq": 1 if all(with_experts) else with_experts,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": 1,
        }
    arguments |= arguments_of_layers(model)
    ours, theirs = function_of(model), function_of(model_of(arguments))
    different = [name for name in theirs if name != "vocab_size" and ours[name] != theirs[name]]
    if different:
        flags = (f"  --{name.replace('_', '-')} {ours[name]} (there: {theirs[name]})" for name in different)
        raise CheckpointError("\n".join(("Megatron-LM has no such network:", *flags)))
    return Namespace(**arguments)

"""Megatron-LM's arguments that say which layers a network has: their order, kinds, windows and rotation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

from megalite.config import ModelConfig, megatron_flags
from megalite.config.layer_patterns import MOST_LAYERS
from megalite.config.layer_specs import (
    ATTENTION_LETTER,
    DELTA_LETTER,
    EXPERTS_LETTER,
    LATENT_LETTER,
    LETTERS,
    MAMBA_LETTER,
    NEXT_DEPTH,
    NEXT_STAGE,
    SPARSE_LETTER,
    pattern_of,
    specs_of_letters,
)
from megalite.config.megatron_latents import RopeType, with_megatrons_rotation
from megalite.config.prediction import FIELDS, split_pattern
from megalite.errors import CheckpointError, ConfigurationError
from megalite.small_files import shown

NO_NETWORK = "megalite has no such network"
_LATENTS = "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim"
_OF_LETTERS = {
    MAMBA_LETTER: "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads",
    DELTA_LETTER: """linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
        linear_num_value_heads""",
    LATENT_LETTER: _LATENTS,
    SPARSE_LETTER: f"""{_LATENTS} dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq
        dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_indexer_rope_interleaved
        dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon""",
}
"""Fields of ModelConfig with the same name as an argument, which have a meaning only if there is such a layer."""
_THEIRS = {*_OF_LETTERS, ATTENTION_LETTER, EXPERTS_LETTER, "-"}
"""Letters that Megatron-LM has, too."""
_PATTERN = ("hybrid_layer_pattern", "hybrid_override_pattern")
_SPEC = ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")
"""Value of --spec that Megatron-LM's networks with a pattern have."""
LAYER_ARGUMENTS = {
    *(name for names in _OF_LETTERS.values() for name in names.split()),
    *_PATTERN,
    *("experimental_attention_variant", "linear_attention_freq", "window_size", "window_attn_skip_freq"),
    *("no_rope_freq", "multi_latent_attention", "rope_type", *FIELDS.split()),
}
"""Arguments that are read here."""
_READ_BY_OTHERS = """kv_channels use_rope_scaling rope_scaling_factor rotary_seq_len_interpolation_factor
    yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int"""
"""Arguments that Megatron-LM's attention over latents does not read."""


def pattern_in(arguments: Mapping[str, Any]) -> object:
    """Return the pattern of layers, by whichever name the run had it, or None."""
    return next((arguments[name] for name in _PATTERN if arguments.get(name) is not None), None)


def is_of_pattern(name: str, value: object) -> bool:
    """Tell whether an argument has this value only because the network has a pattern."""
    specs = megatron_flags.tables()["accepted_values"]["spec"]["values"].split()
    words = value if isinstance(value, list) else [value]
    return name == "is_hybrid_model" or (name == "spec" and all(word in specs for word in words))


def layers_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that say which layers a network has, but for those of experts.

    Raises CheckpointError if a letter of a pattern is no layer of megalite.
    """
    rotation = arguments.get("no_rope_freq")
    found = _window(arguments) | ({"no_rope_freq": as_text(rotation)} if rotation else {})  # 0 means none
    if arguments.get("mtp_num_layers"):
        found |= {name: arguments[name] for name in FIELDS.split() if arguments.get(name) is not None}
    if (pattern := pattern_in(arguments)) is None:
        latents = {"multi_latent_attention": True} if arguments.get("multi_latent_attention") else {}
        return found | latents | _sizes(arguments, LATENT_LETTER * bool(latents)) | _variant(arguments)
    if not isinstance(pattern, str):
        return found | {"hybrid_layer_pattern": pattern}
    try:
        letters, parts = split_pattern(pattern)
        letters = letters.replace(NEXT_STAGE, "")  # stages are no part of a network
        specs_of_letters(letters)
    except ConfigurationError as error:
        raise CheckpointError(f"  {error}") from error
    if parts:
        found |= {"mtp_num_layers": len(parts), "mtp_hybrid_override_pattern": parts[0]}
    of_layers = _sizes(arguments, letters + (found.get("mtp_hybrid_override_pattern") or ""))
    return found | of_layers | {"hybrid_layer_pattern": letters, "num_layers": len(letters)}


def _variant(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a GPT with linear attention in some layers, or sparse in all; empty for another one."""
    if (variant := arguments.get("experimental_attention_variant")) is None:
        return {}
    if variant == "dsa":
        return _sizes(arguments, SPARSE_LETTER) | {"experimental_attention_variant": variant}
    freq = arguments.get("linear_attention_freq")
    return _sizes(arguments, DELTA_LETTER) | {
        "experimental_attention_variant": "gated_delta_net" if variant == "gdn" else variant,
        "linear_attention_freq": None if freq is None else as_text(freq),
    }


def _sizes(arguments: Mapping[str, Any], letters: str) -> dict[str, Any]:
    """Return the fields of the sizes of these layers that the arguments have."""
    return {name: arguments[name] for name in _names(letters) if arguments.get(name) is not None}


def _names(letters: str) -> list[str]:
    return [name for letter, names in _OF_LETTERS.items() if letter in letters for name in names.split()]


def _window(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for a sliding window.

    `window_size` is (keys before, keys after), and -1 means all keys. `window_attn_skip_freq` is N, or a list of 0, 1.
    """
    size, skip = arguments.get("window_size"), arguments.get("window_attn_skip_freq")
    if size is None:
        return {}
    text = as_text(size)
    text = text.strip("[]").replace(" ", "") if isinstance(size, list | tuple) else text
    if text.replace(" ", "").strip("()").startswith("-1,"):
        return {}
    return {"window_size": text} | ({} if skip is None else {"window_attn_skip_freq": as_text(skip)})


def with_rotation(model: ModelConfig, rope_type: object) -> ModelConfig:
    """Return the network with the rotation of its latent attention, which arguments say otherwise than ours.

    Megatron-LM always rotates it, and reads none of the arguments for the rotation of other attention.

    Raises:
        CheckpointError: Megatron-LM has no such network, or megalite has none.
    """
    if not model.has_latents:
        return model
    if model.position_embedding_type == "yarn":
        raise CheckpointError("  --position-embedding-type yarn with latent attention: Megatron-LM has no such network")
    if rope_type not in (None, *get_args(RopeType)):
        raise CheckpointError(f"  --rope-type {shown(rope_type)}: {NO_NETWORK}")
    names = _READ_BY_OTHERS if rope_type == "rope" else f"{_READ_BY_OTHERS} rotary_percent"
    model = replace(model, **{name: getattr(ModelConfig, name) for name in names.split()})
    if model.position_embedding_type == "none":
        model = replace(model, position_embedding_type="rope")
    try:
        return with_megatrons_rotation(model, None if rope_type is None else str(rope_type))
    except ConfigurationError as error:
        raise CheckpointError(f"  {error}") from error


def as_text(value: object) -> str:
    """Return a number, a text or a list of integers as text, in the form that a flag takes."""
    if isinstance(value, list | tuple) and len(value) <= MOST_LAYERS and all(type(each) is int for each in value):
        return str(list(value))
    return value if isinstance(value, str) else shown(value)


def layer_problems(model: ModelConfig) -> Iterator[str]:
    """Yield a line for what a network has that Megatron-LM computes otherwise, or that is not converted."""
    letters = pattern_of(model.all_layers)
    if others := [letter for letter in LETTERS if letter not in _THEIRS and letter in letters]:
        yield f"--hybrid-layer-pattern with {' and '.join(others)}: such layers are not converted"
    if model.has_latents and model.attention_output_gate:
        yield "--attention-output-gate with latent attention: Megatron-LM has no such network"
    if "sparse_attention" in model.kinds:
        yield from _sparse_problems(model)
    if "gated_delta" in model.kinds:  # its norm and activation are the network's there
        if model.normalization != "RMSNorm" or model.apply_layernorm_1p:
            without = "a gated delta net without --normalization RMSNorm, or with --apply-layernorm-1p"
            yield f"{without}: its norm is the network's in Megatron-LM, and always a plain RMSNorm in megalite"
        if not model.swiglu:
            yield "a gated delta net without --swiglu: its activation is the network's in Megatron-LM, SiLU in megalite"


def _sparse_problems(model: ModelConfig) -> Iterator[str]:
    """Yield a line for what sparse attention has in one of the two programs alone."""
    if model.hybrid_layer_pattern is not None and model.qk_layernorm:
        yield "--qk-layernorm with D in --hybrid-layer-pattern: Megatron-LM's has no norms of latents there"
    if model.add_bias_linear:
        yield "--add-bias-linear with sparse attention: Megatron-LM has no such network"
    if model.dsa_indexer_topk_freq > 1 and model.depths > 1:
        yield (
            f"--dsa-indexer-topk-freq {model.dsa_indexer_topk_freq} with several depths: Megatron-LM counts their "
            "layers on, and here each one has an indexer"
        )


def arguments_of_layers(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments that describe the layers of a network, but for those of experts."""
    windows = [layer.keys_before for layer in model.layers]
    arguments: dict[str, Any] = {
        "window_size": next(((before, 0) for before in windows if before is not None), None),
        "window_attn_skip_freq": [int(before is not None) for before in windows] if None in windows else None,
        "no_rope_freq": [int(not layer.rotary) for layer in model.layers] if model.no_rope_freq is not None else None,
        **{name: getattr(model, name) for name in _names(pattern_of(model.all_layers))},
    }
    if model.experimental_attention_variant == "dsa":
        arguments["experimental_attention_variant"] = "dsa"
    elif model.experimental_attention_variant is not None:
        linear = [int(layer.mixer == "gated_delta") for layer in model.layers]
        arguments |= {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": linear}
    if model.has_latents:
        arguments |= {"multi_latent_attention": True, "rope_type": None}
        if model.position_embedding_type == "yarn":
            arguments["position_embedding_type"] = "rope"
        names = ("rotary_scaling_factor", "mscale", "mscale_all_dim")
        arguments |= {name: getattr(model, name) for name in names}
    if model.depths:
        arguments |= {name: getattr(model, name) for name in FIELDS.split()} | {"mtp_hybrid_override_pattern": None}
    if (pattern := model.hybrid_layer_pattern) is not None:
        pattern += f"{NEXT_DEPTH}{model.mtp_hybrid_override_pattern}" * model.depths
        arguments |= {"hybrid_layer_pattern": pattern, "is_hybrid_model": True, "spec": list(_SPEC)}
    return arguments

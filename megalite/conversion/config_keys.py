"""Keys of a family's config.json. Each entry reads and writes one or more keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config import ModelConfig
from megalite.config.activations import ACTIVATIONS, FLAGS, TANH_GELU
from megalite.config.layer_patterns import MOST_LAYERS
from megalite.errors import CheckpointError
from megalite.small_files import shown

Json = Mapping[str, Any]
_REQUIRED = object()


@dataclass(frozen=True)
class Keys:
    """Keys of config.json that have a meaning only together."""

    names: tuple[str, ...]
    read: Callable[[Json], dict[str, Any]]
    """Function that returns the fields of ModelConfig for the keys. Raises CheckpointError for unsupported values."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Function that returns the keys for a model, as exactly as they can express it.

    The caller reads them again to find what they cannot express.
    """


def key(name: str, field: str, default: Any = _REQUIRED, *, written: str | None = None) -> Keys:
    """Return the entry for a key that equals a field.

    `default`: the family's value if the key is missing or null. `written`: the attribute of ModelConfig to write, if it
    is not the field itself, because the field may be None.
    """

    def read(config: Json) -> dict[str, Any]:
        value = config.get(name)
        value = default if value is None else value
        if value is _REQUIRED:
            raise CheckpointError(f"it has no {name}")
        return {field: value}

    return Keys((name,), read, lambda model: {name: getattr(model, written or field)})


def fixed(name: str, value: Any, *, written: bool = True) -> Keys:
    """Return the entry for a key with only one supported value. The key may also be missing or null."""

    def read(config: Json) -> dict[str, Any]:
        if config.get(name) not in (None, value):
            raise CheckpointError(f"{name} is {shown(config[name])}, but only {shown(value)} is supported")
        return {}

    return Keys((name,), read, lambda _: {name: value} if written else {})


def unread(*names: str) -> Keys:
    """Return the entry for keys that transformers does not read, or reads only for training."""
    return Keys(names, lambda _: {}, lambda _: {})


def negated(name: str, field: str, default: bool) -> Keys:
    """Return the entry for a key that is true if a field is false. `default`: the family's value of a missing key."""
    return Keys(
        (name,),
        lambda config: {field: not config.get(name, default)},
        lambda model: {name: not getattr(model, field)},
    )


def tied(default: bool) -> Keys:
    """Return the entry for the key that ties the output layer to the word embedding."""
    return negated("tie_word_embeddings", "untie_embeddings_and_output_weights", default)


def grouped_queries(default: int | None = None) -> Keys:
    """Return the entry for the number of key-value heads. If missing: `default`; if null: one per query head."""

    def read(config: Json) -> dict[str, Any]:
        heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads", default)
        if groups is None or groups == heads:
            return {"group_query_attention": False, "num_query_groups": 1}
        return {"group_query_attention": True, "num_query_groups": groups}

    return Keys(("num_key_value_heads",), read, lambda model: {"num_key_value_heads": model.kv_groups})


def head_width(default: int | None = None) -> Keys:
    """Return the entry for the width of a head. If missing: `default`, or the hidden size divided by the heads."""
    return key("head_dim", "kv_channels", default, written="head_dim")


def linear_biases() -> Keys:
    """Return the entry for Llama's two keys for biases. megalite supports only both biases or none."""

    def read(config: Json) -> dict[str, Any]:
        attention, mlp = config.get("attention_bias", False), config.get("mlp_bias", False)
        if attention != mlp:
            raise CheckpointError(
                f"attention_bias is {shown(attention)} and mlp_bias {shown(mlp)}, but they must be equal"
            )
        return {"add_bias_linear": attention}

    names = ("attention_bias", "mlp_bias")
    return Keys(names, read, lambda model: dict.fromkeys(names, model.add_bias_linear))


def activation(name: str, default: str, *, gated: bool) -> Keys:
    """Return the entry for the activation function of the feed-forward layer."""
    rows = {each: row for row in ACTIVATIONS if row.gated == gated for each in row.hugging_face}

    def read(config: Json) -> dict[str, Any]:
        value = config.get(name) or default
        if value not in rows:
            raise CheckpointError(f"{name} is {shown(value)}, supported are {', '.join(rows)}")
        return {flag: flag in rows[value].flags for flag in FLAGS}

    def write(model: ModelConfig) -> dict[str, Any]:
        alike = [each for each, row in rows.items() if row == model.activation]
        return {name: default if default in alike or not alike else alike[0]}

    return Keys((name,), read, write)


def tanh_gate() -> Keys:
    """Return the entry for the gate of the first Gemma, which is the tanh form of GELU.

    Its published files call it gelu. Version 4 of transformers has a separate key for it.
    """

    def read(config: Json) -> dict[str, Any]:
        for name in ("hidden_act", "hidden_activation"):
            if config.get(name) not in (None, "gelu", *TANH_GELU):
                raise CheckpointError(f"{name} is {shown(config[name])}, supported are gelu, {', '.join(TANH_GELU)}")
        return {flag: flag == "geglu" for flag in FLAGS}

    names = ("hidden_act", "hidden_activation")
    return Keys(names, read, lambda _: dict.fromkeys(names, "gelu_pytorch_tanh"))


def square_root_of_heads() -> Keys:
    """Return the entry for the scalar whose square root divides the attention scores. Gemma's default is 256."""
    return Keys(
        ("query_pre_attn_scalar",),
        lambda config: {"query_pre_attn_scalar": float(config.get("query_pre_attn_scalar", 256))},
        lambda model: {"query_pre_attn_scalar": _whole(model.query_pre_attn_scalar or model.head_dim)},
    )


def soft_cap(name: str, default: float | None) -> Keys:
    """Return the entry for a soft cap. If missing: `default`; if null: no cap."""
    return Keys((name,), lambda config: {name: config.get(name, default)}, lambda model: {name: getattr(model, name)})


def _whole(value: float) -> float:
    return int(value) if math.isfinite(value) and value == int(value) else value


# ------------------------------------------------------------------------------------------------ experts


def num_experts(*names: str) -> Keys:
    """Return the entry for the number of experts, which has the first of these names in files that are written."""

    def read(config: Json) -> dict[str, Any]:
        values = [config[name] for name in names if config.get(name) is not None]
        if not values or any(value != values[0] for value in values):
            raise CheckpointError(f"{names[0]} is missing" if not values else f"{' and '.join(names)} differ")
        return {"num_experts": values[0]}

    return Keys(names, read, lambda model: {names[0]: model.num_experts})


def sparse_layers() -> Keys:
    """Return the entry for Qwen's layers with experts: every decoder_sparse_step-th one that is not in a list."""

    def read(config: Json) -> dict[str, Any]:
        step, dense, layers = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or [], _layers(config)
        if type(step) is not int or step < 1 or any(type(each) is not int for each in dense):
            raise CheckpointError(f"decoder_sparse_step {shown(step)} or mlp_only_layers {shown(dense)} is no number")
        with_experts = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
        if not any(with_experts):
            raise CheckpointError("no layer has experts")
        pattern = "[" + ",".join(str(int(each)) for each in with_experts) + "]"
        return {"moe_layer_freq": None if all(with_experts) else pattern}

    def write(model: ModelConfig) -> dict[str, Any]:
        dense = [number for number, layer in enumerate(model.layers) if layer.feed_forward == "dense"]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}

    return Keys(("decoder_sparse_step", "mlp_only_layers"), read, write)


def leading_dense(name: str, default: int) -> Keys:
    """Return the entry for the number of layers without experts, which are the first ones."""

    def read(config: Json) -> dict[str, Any]:
        dense, layers = config.get(name, default), _layers(config)
        if type(dense) is not int or not 0 <= dense < layers:
            raise CheckpointError(f"{name} is {shown(dense)} for {layers} layers")
        return {"moe_layer_freq": f"[{','.join(['0'] * dense + ['1'] * (layers - dense))}]" if dense else None}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {name: next((number for number, layer in enumerate(model.layers) if layer.feed_forward == "moe"), 0)}

    return Keys((name,), read, write)


def shared_experts(name: str, width: str) -> Keys:
    """Return the entry for the number of shared experts, each as wide as a routed one, whose width is key `width`."""

    def read(config: Json) -> dict[str, Any]:
        count = config.get(name, 1)
        if type(count) is not int or count < 1:
            raise CheckpointError(f"{name} is {shown(count)}, it must be a whole number above 0")
        return {"moe_shared_expert_intermediate_size": count * config[width]}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {name: max((model.moe_shared_expert_intermediate_size or 0) // model.expert_ffn_size, 1)}

    return Keys((name,), read, write)


def prediction_layers(name: str) -> Keys:
    """Return the entry for the number of layers that predict further tokens, none of which megalite has."""

    def read(config: Json) -> dict[str, Any]:
        count = config.get(name) or 0
        if type(count) is not int or not 0 <= count <= MOST_LAYERS:
            raise CheckpointError(f"{name} is {shown(count)}, which is no number of layers")
        return {}

    return Keys((name,), read, lambda _: {name: 0})


def expert_groups() -> Keys:
    """Return the entry for groups of experts, whose score is the sum of their two best (DeepSeek-V3, GLM-4.5)."""

    def read(config: Json) -> dict[str, Any]:
        groups, chosen = config.get("n_group", 1), config.get("topk_group", 1)
        if groups == 1:
            return dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_scores"))
        return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen, "moe_router_group_scores": 2}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {"n_group": model.moe_router_num_groups or 1, "topk_group": model.moe_router_group_topk or 1}

    return Keys(("n_group", "topk_group"), read, write)


def normalized_scores(name: str, topk: str) -> Keys:
    """Return the entry for the key that says if the scores of the chosen experts, `topk` in number, add up to 1.

    megalite normalizes them if there are several, and never a single one.
    """

    def read(config: Json) -> dict[str, Any]:
        several = config[topk] != 1
        if config.get(name, True) != several:
            raise CheckpointError(f"{name} is {shown(config.get(name, True))}, but only {shown(several)} is supported")
        return {}

    return Keys((name,), read, lambda model: {name: model.moe_router_topk != 1})


# ------------------------------------------------------------------------------------------------ rotary embeddings
#
# Keys are written with the names in published checkpoints, which every version of transformers reads (`rope_theta`,
# `rope_scaling`). The keys that version 5 writes (`rope_parameters`) are also read.

_SCALINGS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "rotary_seq_len_interpolation_factor"},
    "llama3": {
        "factor": "rope_scaling_factor",
        "low_freq_factor": "rope_scaling_low_freq_factor",
        "high_freq_factor": "rope_scaling_high_freq_factor",
        "original_max_position_embeddings": "rope_scaling_original_max_position_embeddings",
    },
    "yarn": {
        "factor": "rotary_scaling_factor",
        "original_max_position_embeddings": "yarn_original_max_position_embeddings",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "truncate": "yarn_correction_range_round_to_int",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "attention_factor": "yarn_attention_factor",
    },
}
"""Keys of each kind of scaling, with their fields.

If a key is missing, the field has its default. Only the original length is then max_position_embeddings.
"""


def _scaling_fields(parameters: Json, max_positions: Any) -> dict[str, Any]:
    """Return the fields for rotary parameters, in the old or new form. `max_positions`: max_position_embeddings."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _SCALINGS:
        raise CheckpointError(f"rotary embeddings are scaled by {shown(kind)}, supported are {', '.join(_SCALINGS)}")
    known = _SCALINGS[kind]
    handled = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    unknown = sorted(name for name in parameters if name not in known and name not in handled)
    if unknown:
        raise CheckpointError(f"{', '.join(unknown)[:200]} of rotary embeddings scaled by {shown(kind)} is unknown")
    given = {name: parameters[name] for name in known if parameters.get(name) is not None}
    if "original_max_position_embeddings" in known:
        given.setdefault("original_max_position_embeddings", max_positions)
    if kind == "yarn":
        given.setdefault("factor", max_positions / given["original_max_position_embeddings"])
        if not (given.get("mscale") and given.get("mscale_all_dim")):  # one of them alone has no effect
            given = {name: value for name, value in given.items() if not name.startswith("mscale")}
    elif "factor" in known and "factor" not in given:
        raise CheckpointError(f"rotary embeddings scaled by {shown(kind)} have no factor")
    values = {known[name]: value for name, value in given.items()}
    return values | {
        "use_rope_scaling": kind == "llama3",
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
    }


def _scaling(model: ModelConfig) -> dict[str, Any]:
    """Return the keys for the scaling of a model; {} if nothing is scaled."""
    kind = "default"
    if model.position_embedding_type == "yarn":
        kind = "yarn"
    elif model.use_rope_scaling:
        kind = "llama3"
    elif model.rotary_seq_len_interpolation_factor is not None:
        kind = "linear"
    values = {name: getattr(model, field) for name, field in _SCALINGS[kind].items()}
    if kind == "yarn":
        left_out = {name for name, field in _SCALINGS[kind].items() if values[name] == getattr(ModelConfig, field)}
        if "mscale" not in left_out or "mscale_all_dim" not in left_out:  # one of them alone has no effect
            left_out -= {"mscale", "mscale_all_dim"}
        # The factor is always written. Without it, a reader would use the ratio of the two lengths.
        values = {name: value for name, value in values.items() if name == "factor" or name not in left_out}
    return {"rope_type": kind, **values} if values else {}


def rotary(theta: str = "rope_theta", share: str | None = None, default_share: float = 1.0) -> Keys:
    """Return the entry for rotary embeddings: their base, the rotated share of a head, and their scaling.

    `share` is the key for the rotated share. If it is None, the family always rotates whole heads.
    """

    def read(config: Json) -> dict[str, Any]:
        parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
        base: Any = parameters.get("rope_theta", config.get(theta, 10000.0))
        part: Any = parameters.get("partial_rotary_factor", config.get(share or "partial_rotary_factor", default_share))
        if share is None and part != 1.0:
            raise CheckpointError(f"partial_rotary_factor is {shown(part)}, but this family rotates all of a head")
        scaled = _scaling_fields(parameters, config.get("max_position_embeddings"))
        return {"rotary_base": float(base), "rotary_percent": float(part), **scaled}

    def write(model: ModelConfig) -> dict[str, Any]:
        written = {theta: model.rotary_base, "rope_scaling": _scaling(model) or None}
        return written if share is None else written | {share: model.rotary_percent}

    return Keys((theta, share or "partial_rotary_factor", "rope_scaling", "rope_parameters"), read, write)


def rotary_of_two_kinds() -> Keys:
    """Return the entry for Gemma 3. Layers with a sliding window have their own base, and no scaling."""

    def read(config: Json) -> dict[str, Any]:
        nested = config.get("rope_parameters") or {}
        full = {**(nested.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
        sliding = nested.get("sliding_attention") or {}
        if sliding.get("rope_type", "default") != "default":
            raise CheckpointError(f"layers with a window have rotary embeddings of kind {shown(sliding['rope_type'])}")
        if "type" in (config.get("rope_scaling") or {}) and "rope_type" not in full:
            raise CheckpointError("rope_scaling has a type, but no rope_type, which transformers needs here")
        if not full.get("truncate", True):
            raise CheckpointError("truncate is false, which transformers ignores if layers are of two kinds")
        unknown = [name for name in nested if name not in ("full_attention", "sliding_attention")]
        if unknown:
            raise CheckpointError(f"rope_parameters of {', '.join(unknown)[:200]} are unknown")
        local: Any = sliding.get("rope_theta", config.get("rope_local_base_freq", 10_000.0))
        base: Any = full.get("rope_theta", config.get("rope_theta", 1_000_000.0))
        scaled = _scaling_fields(full, config.get("max_position_embeddings"))
        return {"rotary_base": float(base), "window_rotary_base": float(local), **scaled}

    def write(model: ModelConfig) -> dict[str, Any]:
        local = model.rotary_base if model.window_rotary_base is None else model.window_rotary_base
        return {
            "rope_theta": model.rotary_base,
            "rope_local_base_freq": local,
            "rope_scaling": _scaling(model) or None,
        }

    return Keys(("rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters"), read, write)


# ------------------------------------------------------------------------------------------------ sliding windows


def _window_fields(size: int | None, windowed: list[bool]) -> dict[str, Any]:
    """Return the fields for a window in which a token attends to `size` keys, including its own."""
    if size is None or not any(windowed):
        return {"window_size": None, "window_attn_skip_freq": None}
    pattern = None if all(windowed) else "[" + ",".join(str(int(each)) for each in windowed) + "]"
    return {"window_size": f"{size - 1},0", "window_attn_skip_freq": pattern}


def _window(model: ModelConfig) -> int | None:
    before = next((layer.keys_before for layer in model.layers if layer.keys_before is not None), None)
    return None if before is None else before + 1


def _layer_types(model: ModelConfig) -> list[str]:
    return ["full_attention" if layer.keys_before is None else "sliding_attention" for layer in model.layers]


def _layers(config: Json) -> int:
    layers = config["num_hidden_layers"]
    if type(layers) is not int or layers > MOST_LAYERS:
        raise CheckpointError(f"num_hidden_layers is {shown(layers)}, at most {MOST_LAYERS:,} are possible")
    return layers


def _windowed(config: Json, otherwise: Callable[[int], bool]) -> list[bool]:
    """Return for each layer whether it has a window, from layer_types or, if this key is missing, from `otherwise`."""
    types, layers = config.get("layer_types"), _layers(config)
    if types is None:
        return [otherwise(layer) for layer in range(layers)]
    unknown = sorted({*types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(f"layer_types has {', '.join(unknown)[:200]}, which is unknown")
    if len(types) != layers:
        raise CheckpointError(f"layer_types has {len(types)} entries for {layers} layers")
    return [kind == "sliding_attention" for kind in types]


def window_everywhere(default: int | None = 4096) -> Keys:
    """Return the entry for Mistral: all layers have a window, or no layer if the key is null."""

    def read(config: Json) -> dict[str, Any]:
        return _window_fields(config.get("sliding_window", default), [True])

    return Keys(("sliding_window",), read, lambda model: {"sliding_window": _window(model)})


def window_from_layer() -> Keys:
    """Return the entry for Qwen: with use_sliding_window, the layers from max_window_layers on have windows."""

    def read(config: Json) -> dict[str, Any]:
        size = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
        return _window_fields(size, _windowed(config, lambda layer: layer >= config.get("max_window_layers", 28)))

    def write(model: ModelConfig) -> dict[str, Any]:
        windowed = [layer.keys_before is not None for layer in model.layers]
        return {
            "use_sliding_window": any(windowed),
            "sliding_window": _window(model),
            "max_window_layers": windowed.index(True) if any(windowed) else model.num_layers,
            "layer_types": _layer_types(model),
        }

    return Keys(("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"), read, write)


def window_pattern(full_every: int) -> Keys:
    """Return the entry for Gemma: in each group of `full_every` layers, the last one has no window."""
    default = 4096

    def read(config: Json) -> dict[str, Any]:
        every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern")) or full_every
        windowed = _windowed(config, lambda layer: (layer + 1) % every != 0)
        return _window_fields(config.get("sliding_window", default), windowed)

    return Keys(
        ("sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"),
        read,
        lambda model: {"sliding_window": _window(model) or default, "layer_types": _layer_types(model)},
    )

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


def value_of(config: Json, name: str, default: Any = _REQUIRED) -> Any:
    """Return the value of a key; if it is missing, `default`, which is that of transformers' class for the family.

    null means nothing or false, as in Python. It is refused where the default is something, because versions of
    transformers differ on what is meant.
    """
    value = config.get(name, default)
    if value is _REQUIRED:
        raise CheckpointError(f"it has no {name}")
    if value is None and default:
        otherwise = "" if default is _REQUIRED else f", or leave it out for {shown(default)}"
        raise CheckpointError(f"{name} is null: give its value{otherwise}")
    return default if value is None else value


def key(name: str, field: str, default: Any = _REQUIRED, *, written: str | None = None) -> Keys:
    """Return the entry for a key that equals a field.

    `default`: the family's value if the key is missing. `written`: the attribute of ModelConfig to write, if it is not
    the field itself, because the field may be None.
    """
    return Keys(
        (name,),
        lambda config: {field: value_of(config, name, default)},
        lambda model: {name: getattr(model, written or field)},
    )


def fixed(name: str, value: Any, *, written: bool = True) -> Keys:
    """Return the entry for a key with only one supported value, which is also the default."""

    def read(config: Json) -> dict[str, Any]:
        found = value_of(config, name, value)
        if found != value:
            raise CheckpointError(f"{name} is {shown(found)}, but only {shown(value)} is supported")
        return {}

    return Keys((name,), read, lambda _: {name: value} if written else {})


def negated(name: str, field: str, default: bool) -> Keys:
    """Return the entry for a key that is true if a field is false. `default`: the family's value of a missing key."""
    return Keys(
        (name,),
        lambda config: {field: not value_of(config, name, default)},
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
        attention, mlp = value_of(config, "attention_bias", False), value_of(config, "mlp_bias", False)
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
        value = value_of(config, name, default)
        if value not in rows:
            raise CheckpointError(f"{name} is {shown(value)}, supported are {', '.join(rows)}")
        return {flag: flag in rows[value].flags for flag in FLAGS}

    def write(model: ModelConfig) -> dict[str, Any]:
        alike = [each for each, row in rows.items() if row == model.activation]
        return {name: default if default in alike or not alike else alike[0]}

    return Keys((name,), read, write)


def equal_dropouts(*names: str, default: float) -> Keys:
    """Return the entry for the dropouts of the embedding and of the residual branches, which megalite has as one."""

    def read(config: Json) -> dict[str, Any]:
        first, second = (value_of(config, name, default) for name in names)
        if first != second:
            raise CheckpointError(
                f"{names[0]} is {shown(first)} and {names[1]} {shown(second)}, but they must be equal"
            )
        return {"hidden_dropout": first}

    return Keys(names, read, lambda model: dict.fromkeys(names, model.hidden_dropout))


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
        values = [value_of(config, name) for name in names if name in config]
        if not values or any(value != values[0] for value in values):
            raise CheckpointError(f"{names[0]} is missing" if not values else f"{' and '.join(names)} differ")
        return {"num_experts": values[0]}

    return Keys(names, read, lambda model: {names[0]: model.num_experts})


def sparse_layers() -> Keys:
    """Return the entry for Qwen's layers with experts: every decoder_sparse_step-th one that is not in a list."""

    def read(config: Json) -> dict[str, Any]:
        step, dense = value_of(config, "decoder_sparse_step", 1), value_of(config, "mlp_only_layers", [])
        layers = _layers(config)
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
        dense, layers = value_of(config, name, default), _layers(config)
        if type(dense) is not int or not 0 <= dense < layers:
            raise CheckpointError(f"{name} is {shown(dense)} for {layers} layers")
        return {"moe_layer_freq": f"[{','.join(['0'] * dense + ['1'] * (layers - dense))}]" if dense else None}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {name: next((number for number, layer in enumerate(model.layers) if layer.feed_forward == "moe"), 0)}

    return Keys((name,), read, write)


def shared_experts(name: str, width: str, default_width: int) -> Keys:
    """Return the entry for the number of shared experts, each as wide as a routed one, whose width is key `width`."""

    def read(config: Json) -> dict[str, Any]:
        count = value_of(config, name, 1)
        if type(count) is not int or count < 1:
            raise CheckpointError(f"{name} is {shown(count)}, it must be a whole number above 0")
        return {"moe_shared_expert_intermediate_size": count * value_of(config, width, default_width)}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {name: max((model.moe_shared_expert_intermediate_size or 0) // model.expert_ffn_size, 1)}

    return Keys((name,), read, write)


PREDICTION_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Names of the number of layers after the last one that predict further tokens; the first one is written."""


def prediction_layers(config: Json) -> int:
    """Return the number of layers that predict further tokens, none of which megalite has."""
    counts = [value_of(config, name, 0) for name in PREDICTION_LAYERS if name in config] or [1]
    if any(type(count) is not int or not 0 <= count <= MOST_LAYERS for count in counts):
        raise CheckpointError(f"{PREDICTION_LAYERS[0]} is {shown(counts[0])}, which is no number of layers")
    if len({*counts}) > 1:
        raise CheckpointError(f"{' and '.join(PREDICTION_LAYERS)} differ")
    return counts[0]


def without_prediction_layers() -> Keys:
    """Return the entry for layers that predict further tokens: they are left out."""

    def read(config: Json) -> dict[str, Any]:
        prediction_layers(config)
        return {}

    return Keys(PREDICTION_LAYERS, read, lambda _: {PREDICTION_LAYERS[0]: 0})


def expert_groups() -> Keys:
    """Return the entry for groups of experts, whose score is the sum of their two best (DeepSeek-V3, GLM-4.5)."""

    def read(config: Json) -> dict[str, Any]:
        groups, chosen = value_of(config, "n_group", 1), value_of(config, "topk_group", 1)
        if groups == 1:
            return dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_scores"))
        return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen, "moe_router_group_scores": 2}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {"n_group": model.moe_router_num_groups or 1, "topk_group": model.moe_router_group_topk or 1}

    return Keys(("n_group", "topk_group"), read, write)


def normalized_scores(name: str, topk: str, default_topk: int) -> Keys:
    """Return the entry for the key that says if the scores of the chosen experts, `topk` in number, add up to 1.

    megalite normalizes them if there are several, and never a single one.
    """

    def read(config: Json) -> dict[str, Any]:
        several, found = value_of(config, topk, default_topk) != 1, value_of(config, name, True)
        if found != several:
            raise CheckpointError(f"{name} is {shown(found)}, but only {shown(several)} is supported")
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
"""Keys of each kind of scaling, with their fields."""
_OPTIONAL = {"beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor"}
"""Keys of scalings that may be missing: the field then has its default. All but `truncate` may be null."""


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
    given = {name: parameters[name] for name in known if name in parameters}
    if "original_max_position_embeddings" in known:
        given.setdefault("original_max_position_embeddings", max_positions)
    if kind == "yarn":
        if given.get("factor") is None:
            given["factor"] = max_positions / given["original_max_position_embeddings"]
        without = {name for name in ("beta_fast", "beta_slow") if not given.get(name)}  # 0 means the default
        without |= {"attention_factor"} if given.get("attention_factor") is None else set()
        if not (given.get("mscale") and given.get("mscale_all_dim")):  # one of them alone has no effect
            without |= {"mscale", "mscale_all_dim"}
        given = {name: value for name, value in given.items() if name not in without}
    if lacking := [name for name in known if name not in _OPTIONAL and given.get(name) is None]:
        raise CheckpointError(f"rotary embeddings scaled by {shown(kind)} have no {' and no '.join(lacking)}")
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


def rotary(
    theta: str = "rope_theta",
    share: str | None = None,
    default_share: float = 1.0,
    *,
    default_base: float = 10_000.0,
) -> Keys:
    """Return the entry for rotary embeddings: their base, the rotated share of a head, and their scaling.

    `share` is the key for the rotated share. If it is None, the family always rotates whole heads.
    """

    def read(config: Json) -> dict[str, Any]:
        parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
        base: Any = parameters.get("rope_theta", config.get(theta, default_base))
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
        if others := sorted({*sliding} - {"rope_type", "rope_theta"} | {*full} & {"partial_rotary_factor"}):
            raise CheckpointError(f"{', '.join(others)[:200]} of rotary embeddings of layers of two kinds is unknown")
        if "type" in (config.get("rope_scaling") or {}) and "rope_type" not in full:
            raise CheckpointError("rope_scaling has a type, but no rope_type, which transformers needs here")
        if full.get("truncate", True) is not True:
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
    if not any(windowed):
        return {"window_size": None, "window_attn_skip_freq": None}
    if size is None:
        raise CheckpointError("layers have sliding windows, but sliding_window is null or switched off")
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
        size = config.get("sliding_window", default)
        return _window_fields(size, [size is not None])

    return Keys(("sliding_window",), read, lambda model: {"sliding_window": _window(model)})


def window_from_layer(*, states_layers: bool = False) -> Keys:
    """Return the entry for Qwen: with use_sliding_window, the layers from max_window_layers on have windows.

    `states_layers`: layer_types must then say which layers have windows, because versions of transformers differ.
    """

    def read(config: Json) -> dict[str, Any]:
        size = config.get("sliding_window", 4096) if value_of(config, "use_sliding_window", False) else None
        first = value_of(config, "max_window_layers", 28)
        if states_layers and size is not None and config.get("layer_types") is None:
            raise CheckpointError("use_sliding_window is true, but no layer_types says which layers have windows")
        return _window_fields(size, _windowed(config, lambda layer: size is not None and layer >= first))

    def write(model: ModelConfig) -> dict[str, Any]:
        windowed = [layer.keys_before is not None for layer in model.layers]
        return {
            "use_sliding_window": any(windowed),
            "sliding_window": _window(model),
            "max_window_layers": windowed.index(True) if any(windowed) else model.num_layers,
            "layer_types": _layer_types(model),
        }

    return Keys(("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"), read, write)


def window_pattern(full_every: int, *, pattern_key: bool = False) -> Keys:
    """Return the entry for Gemma: in each group of `full_every` layers, the last one has no window.

    `pattern_key`: the family has a key for the size of the group.
    """
    default, pattern = 4096, "sliding_window_pattern"

    def read(config: Json) -> dict[str, Any]:
        every = value_of(config, pattern, full_every)
        if every != full_every and not pattern_key and config.get("layer_types") is None:
            raise CheckpointError(f"{pattern} is {shown(every)}, but only {full_every} is supported: give layer_types")
        windowed = _windowed(config, lambda layer: (layer + 1) % every != 0)
        return _window_fields(config.get("sliding_window", default), windowed)

    return Keys(
        ("sliding_window", "layer_types", pattern),
        read,
        lambda model: {"sliding_window": _window(model) or default, "layer_types": _layer_types(model)},
    )

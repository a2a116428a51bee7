"""What the keys of a family's config.json say of a model: each entry of its table is read and written here.

Written are the names that published checkpoints have and every version of transformers reads (`rope_theta`,
`rope_scaling`); read are those that version 5 writes (`rope_parameters`), too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from megalite.config import ModelConfig
from megalite.errors import CheckpointError

Json = Mapping[str, Any]
_REQUIRED = object()


@dataclass(frozen=True)
class Keys:
    """Keys of config.json that say something together."""

    names: tuple[str, ...]
    read: Callable[[Json], dict[str, Any]]
    """The fields of ModelConfig that they stand for. Raises CheckpointError for a value that no field has."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """The keys of a model, as near to it as they come: what they cannot say is found when they are read again."""


def key(name: str, field: str, default: Any = _REQUIRED) -> Keys:
    """A key that is a field. `default`: what the family takes it for where it is left out or null."""

    def read(config: Json) -> dict[str, Any]:
        value = config.get(name)
        value = default if value is None else value
        if value is _REQUIRED:
            raise CheckpointError(f"it has no {name}")
        return {field: value}

    return Keys((name,), read, lambda model: {name: getattr(model, field)})


def fixed(name: str, value: Any, *, written: bool = True) -> Keys:
    """A key that may be left out, null or one value, since megalite's model computes nothing else."""

    def read(config: Json) -> dict[str, Any]:
        if config.get(name) not in (None, value):
            raise CheckpointError(f"{name} is {config[name]!r}, where only {value!r} is known")
        return {}

    return Keys((name,), read, lambda _: {name: value} if written else {})


def unread(*names: str) -> Keys:
    """Keys that some files of a family have, and transformers does not read."""
    return Keys(names, lambda _: {}, lambda _: {})


def tied(default: bool) -> Keys:
    """Whether the output layer is the word embedding."""
    return Keys(
        ("tie_word_embeddings",),
        lambda config: {"untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", default)},
        lambda model: {"tie_word_embeddings": not model.untie_embeddings_and_output_weights},
    )


def grouped_queries(default: int | None = None) -> Keys:
    """The number of key-value heads; left out: `default`; null: one for each query head."""

    def read(config: Json) -> dict[str, Any]:
        heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads", default)
        if groups is None or groups == heads:
            return {"group_query_attention": False, "num_query_groups": 1}
        return {"group_query_attention": True, "num_query_groups": groups}

    return Keys(("num_key_value_heads",), read, lambda model: {"num_key_value_heads": model.kv_groups})


def head_width(default: int | None = None) -> Keys:
    """The width of a head; left out: `default`, or the hidden size over the heads."""
    return Keys(
        ("head_dim",),
        lambda config: {"kv_channels": config.get("head_dim") or default},
        lambda model: {"head_dim": model.head_dim},
    )


def feed_forward_width(name: str = "intermediate_size") -> Keys:
    """The width of the feed-forward layer; left out: four times the hidden size."""
    return Keys((name,), lambda config: {"ffn_hidden_size": config.get(name)}, lambda model: {name: model.ffn_size})


def linear_biases() -> Keys:
    """Llama's two keys for biases, of which megalite has both or none."""

    def read(config: Json) -> dict[str, Any]:
        attention, mlp = config.get("attention_bias", False), config.get("mlp_bias", False)
        if attention != mlp:
            raise CheckpointError(f"attention_bias is {attention} and mlp_bias {mlp}, where only one for both is known")
        return {"add_bias_linear": attention}

    return Keys(
        ("attention_bias", "mlp_bias"),
        read,
        lambda model: {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear},
    )


_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
_EXACT = ("gelu", "gelu_python")
_OFF = {"swiglu": False, "geglu": False, "exact_gelu": False, "squared_relu": False}


def activation(name: str, default: str, *, gated: bool) -> Keys:
    """The function of the feed-forward layer."""
    if gated:
        names = {each: {"geglu": True} for each in _TANH} | {
            each: {"geglu": True, "exact_gelu": True} for each in _EXACT
        }
        names |= {each: {"swiglu": True} for each in ("silu", "swish")}
    else:
        names = {each: {} for each in _TANH} | {each: {"exact_gelu": True} for each in _EXACT}
        names |= {"relu2": {"squared_relu": True}}

    def read(config: Json) -> dict[str, Any]:
        value = config.get(name) or default
        if value not in names:
            raise CheckpointError(f"{name} is {value!r}, where {', '.join(names)} are known")
        return _OFF | names[value]

    def write(model: ModelConfig) -> dict[str, Any]:
        wanted = {field: getattr(model, field) for field in _OFF}
        alike = [each for each in names if _OFF | names[each] == wanted]
        return {name: default if default in alike or not alike else alike[0]}

    return Keys((name,), read, write)


def tanh_gate() -> Keys:
    """The first Gemma's: a gate of GELU's tanh form, which its published files call gelu, and version 4 of transformers
    by a key of its own."""

    def read(config: Json) -> dict[str, Any]:
        for name in ("hidden_act", "hidden_activation"):
            if config.get(name) not in (None, "gelu", *_TANH):
                raise CheckpointError(f"{name} is {config[name]!r}, where gelu, {', '.join(_TANH)} are known")
        return _OFF | {"geglu": True}

    names = ("hidden_act", "hidden_activation")
    return Keys(names, read, lambda _: dict.fromkeys(names, "gelu_pytorch_tanh"))


# ------------------------------------------------------------------------------------------------ rotary embeddings

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
"""The keys of a kind of scaling, and the fields that they are. What is left out has the field's default, but for the
original length, which is max_position_embeddings then."""


@cache
def _field_defaults() -> dict[str, Any]:
    return {field.name: field.default for field in fields(ModelConfig)}


def _scaling_fields(parameters: Json, max_positions: Any) -> dict[str, Any]:
    """The fields that rotary parameters of either generation stand for; `max_positions`: max_position_embeddings."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _SCALINGS:
        raise CheckpointError(f"rotary embeddings are scaled by {kind!r}, where {', '.join(_SCALINGS)} are known")
    known = _SCALINGS[kind]
    handled = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    unknown = sorted(name for name in parameters if name not in known and name not in handled)
    if unknown:
        raise CheckpointError(f"{', '.join(unknown)} of rotary embeddings scaled by {kind!r} is unknown")
    given = {name: parameters[name] for name in known if parameters.get(name) is not None}
    if "original_max_position_embeddings" in known:
        given.setdefault("original_max_position_embeddings", max_positions)
    if kind == "yarn":
        given.setdefault("factor", max_positions / given["original_max_position_embeddings"])
        if not (given.get("mscale") and given.get("mscale_all_dim")):  # one alone says nothing
            given = {name: value for name, value in given.items() if not name.startswith("mscale")}
    elif "factor" in known and "factor" not in given:
        raise CheckpointError(f"rotary embeddings scaled by {kind!r} have no factor")
    values = {known[name]: value for name, value in given.items()}
    return values | {
        "use_rope_scaling": kind == "llama3",
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
    }


def _scaling(model: ModelConfig) -> dict[str, Any]:
    """The other way round; {} where nothing is scaled."""
    kind = "default"
    if model.position_embedding_type == "yarn":
        kind = "yarn"
    elif model.use_rope_scaling:
        kind = "llama3"
    elif model.rotary_seq_len_interpolation_factor is not None:
        kind = "linear"
    values = {name: getattr(model, field) for name, field in _SCALINGS[kind].items()}
    if kind == "yarn":
        left_out = {name for name, field in _SCALINGS[kind].items() if values[name] == _field_defaults()[field]}
        if "mscale" not in left_out or "mscale_all_dim" not in left_out:  # one alone says nothing
            left_out -= {"mscale", "mscale_all_dim"}
        # The factor is always said: left out it would be that of the two lengths.
        values = {name: value for name, value in values.items() if name == "factor" or name not in left_out}
    return {"rope_type": kind, **values} if values else {}


def rotary(theta: str = "rope_theta", share: str | None = None, default_share: float = 1.0) -> Keys:
    """Rotary embeddings: their base, the `share` of a head that is rotated (None: the family rotates all of it,
    whatever its files say), and how they are scaled."""

    def read(config: Json) -> dict[str, Any]:
        parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
        base: Any = parameters.get("rope_theta", config.get(theta, 10000.0))
        part: Any = parameters.get("partial_rotary_factor", config.get(share or "partial_rotary_factor", default_share))
        if share is None and part != 1.0:
            raise CheckpointError(f"partial_rotary_factor is {part!r}, where this family rotates all of a head")
        scaled = _scaling_fields(parameters, config.get("max_position_embeddings"))
        return {"rotary_base": float(base), "rotary_percent": float(part), **scaled}

    def write(model: ModelConfig) -> dict[str, Any]:
        written = {theta: model.rotary_base, "rope_scaling": _scaling(model) or None}
        return written if share is None else written | {share: model.rotary_percent}

    return Keys((theta, share or "partial_rotary_factor", "rope_scaling", "rope_parameters"), read, write)


def rotary_of_two_kinds() -> Keys:
    """Gemma 3's: layers with a sliding window have a base of their own, unscaled."""

    def read(config: Json) -> dict[str, Any]:
        nested = config.get("rope_parameters") or {}
        full = {**(nested.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
        sliding = nested.get("sliding_attention") or {}
        if sliding.get("rope_type", "default") != "default":
            raise CheckpointError(f"layers with a window have rotary embeddings of kind {sliding['rope_type']!r}")
        if "type" in (config.get("rope_scaling") or {}) and "rope_type" not in full:
            raise CheckpointError("rope_scaling has a type and no rope_type, by which transformers scales here")
        if not full.get("truncate", True):
            raise CheckpointError("truncate is false, which transformers does not see where layers are of two kinds")
        unknown = [name for name in nested if name not in ("full_attention", "sliding_attention")]
        if unknown:
            raise CheckpointError(f"rope_parameters of {', '.join(unknown)} are unknown")
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
    """A token sees `size` keys, its own among them."""
    if size is None or not any(windowed):
        return {"window_size": None, "window_attn_skip_freq": None}
    pattern = None if all(windowed) else "[" + ",".join(str(int(each)) for each in windowed) + "]"
    return {"window_size": f"{size - 1},0", "window_attn_skip_freq": pattern}


def _window(model: ModelConfig) -> int | None:
    before = next((before for before in model.keys_before if before is not None), None)
    return None if before is None else before + 1


def _layer_types(model: ModelConfig) -> list[str]:
    return ["full_attention" if before is None else "sliding_attention" for before in model.keys_before]


def _windowed(config: Json, otherwise: Callable[[int], bool]) -> list[bool]:
    """Which layers have a window, by layer_types, or where it is left out as `otherwise` says of a layer."""
    types = config.get("layer_types")
    if types is None:
        return [otherwise(layer) for layer in range(config["num_hidden_layers"])]
    unknown = sorted({*types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(f"layer_types has {', '.join(unknown)}, which is unknown")
    if len(types) != config["num_hidden_layers"]:
        raise CheckpointError(f"layer_types has {len(types)} entries for {config['num_hidden_layers']} layers")
    return [kind == "sliding_attention" for kind in types]


def window_everywhere(default: int = 4096) -> Keys:
    """Mistral's: all layers have it, or with null none."""

    def read(config: Json) -> dict[str, Any]:
        return _window_fields(config.get("sliding_window", default), [True])

    return Keys(("sliding_window",), read, lambda model: {"sliding_window": _window(model)})


def window_from_layer() -> Keys:
    """Qwen's: only with use_sliding_window, and then from layer max_window_layers on."""

    def read(config: Json) -> dict[str, Any]:
        size = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
        return _window_fields(size, _windowed(config, lambda layer: layer >= config.get("max_window_layers", 28)))

    def write(model: ModelConfig) -> dict[str, Any]:
        first = next((layer for layer, before in enumerate(model.keys_before) if before is not None), model.num_layers)
        size = _window(model)
        return {
            "use_sliding_window": size is not None,
            "sliding_window": size,
            "max_window_layers": first,
            "layer_types": _layer_types(model),
        }

    return Keys(("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"), read, write)


def window_pattern(full_every: int, default: int = 4096) -> Keys:
    """Gemma's: of so many layers the last sees all."""

    def read(config: Json) -> dict[str, Any]:
        every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern")) or full_every
        windowed = _windowed(config, lambda layer: (layer + 1) % every != 0)
        return _window_fields(config.get("sliding_window", default), windowed)

    return Keys(
        ("sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"),
        read,
        lambda model: {"sliding_window": _window(model) or default, "layer_types": _layer_types(model)},
    )


def square_root_of_heads() -> Keys:
    """The scalar under the root by which scores are divided; Gemma's default is 256."""
    return Keys(
        ("query_pre_attn_scalar",),
        lambda config: {"query_pre_attn_scalar": float(config.get("query_pre_attn_scalar", 256))},
        lambda model: {"query_pre_attn_scalar": _whole(model.query_pre_attn_scalar or model.head_dim)},
    )


def soft_cap(name: str, default: float | None) -> Keys:
    """A cap, off where the key is null; left out: `default`."""
    return Keys((name,), lambda config: {name: config.get(name, default)}, lambda model: {name: getattr(model, name)})


def embedding_dropout() -> Keys:
    """GPT-2 names the dropout of embeddings apart, which megalite drops as it does the residual branches."""
    return Keys(("embd_pdrop",), lambda _: {}, lambda model: {"embd_pdrop": model.hidden_dropout})


def _whole(value: float) -> float:
    return int(value) if math.isfinite(value) and value == int(value) else value
